"""Metric: the name of a number, and how each part of Leeway shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:
    from leeway.metrics.step_data import StepData

Source = Literal["trainer", "sampler", "controller", "launcher"]
Kind = Literal["gauge", "counter", "histogram"]
Measure = Callable[["StepData"], float | None]
"""Computes a metric from the data of one optimiser step; None: this step has no value."""


@dataclass(frozen=True)
class Series:
    """A Prometheus series that a service exposes at /metrics.

    `name`: for a counter without `_total`, which the client appends. `values`: values of all `labels`, where
    the metric determines them; several metrics may then feed series of one name.
    """

    service: Source
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, for a histogram."""

    def of(self, *values: str) -> Series:
        """The series with these label values."""
        return replace(self, values=values)


@dataclass(frozen=True)
class Column:
    """A column of the live table. `place` orders columns; `form` is a format specification such as `.3f`."""

    place: float
    title: str
    form: str


@dataclass(frozen=True)
class Plot:
    """A panel of `leeway report` that shows the metric as a line over the steps."""

    title: str
    note: str
    label: str
    shape: Literal["linear", "hv"] = "linear"
    """`hv`: the value stays until the next step."""


class Metric(str):
    """The name of a metric, which is the string itself, with its unit and how it is shown.

    `unit`: empty for text. `help`: one sentence for the documentation. `measured_by`: the process that
    computes it. `recorded`: it is part of a step's line in metrics.jsonl; otherwise it is only exposed as
    Prometheus `series`. `measure`: computes the value of a step; the trainer calls it after the optimiser
    step. `column`: shown in the live table. `status`: shown by `leeway status`. `summary`: key of the
    per-step list in summary.json. `plot`: a panel of the report.
    """

    unit: str
    help: str
    measured_by: Source
    recorded: bool
    measure: Measure | None
    series: tuple[Series, ...]
    column: Column | None
    status: bool
    summary: str | None
    plot: Plot | None

    def __new__(
        cls,
        name: str,
        *,
        unit: str,
        help: str,
        measured_by: Source = "trainer",
        recorded: bool = True,
        measure: Measure | None = None,
        series: tuple[Series, ...] = (),
        column: Column | None = None,
        status: bool = False,
        summary: str | None = None,
        plot: Plot | None = None,
    ) -> Self:
        metric = super().__new__(cls, name)
        metric.unit, metric.help, metric.measured_by = unit, help, measured_by
        metric.recorded, metric.measure, metric.series = recorded, measure, series
        metric.column, metric.status, metric.summary, metric.plot = column, status, summary, plot
        return metric

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """A copy is the plain name."""
        return str, (str(self),)


class MetricFamily(Metric):
    """Metrics of one kind, one per member; the name ends in a placeholder: `disc/kl/<sampler>`."""

    @property
    def prefix(self) -> str:
        """What all names of the family begin with."""
        return self.partition("<")[0]

    def of(self, member: str) -> str:
        """The metric's name for one member."""
        return self.prefix + member

    def member(self, name: str) -> str | None:
        """The member that a metric's name belongs to; None for a name outside the family."""
        found = name.removeprefix(self.prefix)
        return found if found and found != name else None


def service_metric(
    service: Source,
    name: str,
    unit: str,
    help: str,
    kind: Kind,
    *,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
) -> Metric:
    """A metric that a service only exposes at /metrics, as `leeway_` and its name with underscores."""
    series = Series(service, f"leeway_{name.replace('/', '_')}", kind, help, labels, buckets=buckets)
    return Metric(name, unit=unit, help=f"{help}.", measured_by=service, recorded=False, series=(series,))
