"""The plots of a run's report: each draws a plotly figure, or None if the run has no such metric.

A metric with `plot` in the catalogue gets a panel of its line; panels of several metrics are drawn here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from leeway.metrics import Metric, Plot, all_metrics
from leeway.metrics.areas.discrepancy import DISC_ABS_MEAN, DISC_KL
from leeway.metrics.areas.lag import LAG_ESS_SEQ, LAG_ESS_TOK, LAG_VAR, LAG_VAR_SEQ
from leeway.metrics.areas.reward import REWARD_MEAN
from leeway.metrics.areas.sampler import SAMPLER_TOKENS_PER_S
from leeway.metrics.areas.time import TIME_STEP_S, TIME_WAIT_S
from leeway.metrics.areas.trainer import TRAINER_TOKENS_PER_S
from leeway_host.report.figure import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    add_legend_entry,
    add_line,
    mark_resyncs,
    new_figure,
    scale_y_axis,
    steps_of,
)
from leeway_host.report.read import Run

TIME_PREFIX = "time/"
"""Area of the metrics that add up to the time of a step."""
STACK = ["#c4cad4", "#7aa5ec", "#2f6fdb", "#e3b27a", "#2a9d62", "#c8374a", "#8a63c9"]


@dataclass(frozen=True)
class Panel:
    """One plot of the page."""

    key: str
    title: str
    note: str
    draw: Callable[[Run], Any]


def draw_reward(run: Run) -> Any:
    """Mean reward per step and its running mean."""
    if not run.has(REWARD_MEAN):
        return None
    values = run.column(REWARD_MEAN)
    window = max(3, len(values) // 8)
    figure = new_figure("reward")
    add_line(figure, run, "batch mean", values, GREY, width=1, markers=True)
    add_line(figure, run, f"mean of {window} steps", running_mean(values, window), BLUE, width=2.5)
    return figure


def draw_ess(run: Run) -> Any:
    """Token and sequence ESS with the threshold; resyncs as vertical lines with their reason."""
    if not run.has(LAG_ESS_TOK):
        return None
    figure = new_figure("ESS / n")
    add_line(figure, run, "token", run.column(LAG_ESS_TOK), BLUE, markers=True)
    add_line(figure, run, "sequence", run.column(LAG_ESS_SEQ), ORANGE, markers=True)
    mark_resyncs(figure, run, reasons=True)
    if run.ess_threshold is not None:
        dash = {"color": RED, "width": 1.5, "dash": "dash"}
        figure.add_hline(y=run.ess_threshold, line=dash)
        add_legend_entry(figure, f"resync below {run.ess_threshold:g}", dash)
    figure.update_yaxes(range=[0, 1.08])
    return figure


def draw_lag_variance(run: Run) -> Any:
    """Variance of the log lag ratio over the run."""
    if not run.has(LAG_VAR):
        return None
    figure = new_figure("variance of log lag ratio")
    add_line(figure, run, "token", run.column(LAG_VAR), BLUE, markers=True)
    if run.has(LAG_VAR_SEQ):
        add_line(figure, run, "sequence", run.column(LAG_VAR_SEQ), ORANGE, markers=True)
    mark_resyncs(figure, run)
    scale_y_axis(figure, run, [LAG_VAR, LAG_VAR_SEQ])
    return figure


def draw_prediction(run: Run) -> Any:
    """Measured ESS against exp(-variance), which holds for a Gaussian log ratio."""
    points = [
        ("token", BLUE, _pairs(run, LAG_VAR, LAG_ESS_TOK)),
        ("sequence", ORANGE, _pairs(run, LAG_VAR_SEQ, LAG_ESS_SEQ)),
    ]
    if not any(pairs for _, _, pairs in points):
        return None
    figure = new_figure("measured ESS / n", x_title="variance of log lag ratio")
    top = max(x for _, _, pairs in points for x, _ in pairs) or 1e-6
    grid = [top * 1.05 * i / 100 for i in range(101)]
    figure.add_scatter(
        x=grid,
        y=[math.exp(-x) for x in grid],
        name="exp(-variance)",
        mode="lines",
        line={"color": GREY, "dash": "dot", "width": 2},
    )
    for name, color, pairs in points:
        if pairs:
            figure.add_scatter(
                x=[x for x, _ in pairs],
                y=[y for _, y in pairs],
                name=name,
                mode="markers",
                marker={"color": color, "size": 7, "opacity": 0.75},
            )
    figure.update_layout(hovermode="closest")
    return figure


def draw_discrepancy(run: Run) -> Any:
    """Discrepancy between sampler and trainer on the same weights."""
    if not run.has(DISC_ABS_MEAN):
        return None
    figure = new_figure("nats per token")
    add_line(figure, run, "mean |log pi_s - log mu|", run.column(DISC_ABS_MEAN), BLUE, markers=True)
    if run.has(DISC_KL):
        kl = [value if value and value > 0 else None for value in run.column(DISC_KL)]
        add_line(figure, run, "KL", kl, ORANGE, markers=True)
    mark_resyncs(figure, run)
    figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    return figure


def draw_throughput(run: Run) -> Any:
    """Tokens per second of samplers and trainer."""
    if not (run.has(SAMPLER_TOKENS_PER_S) or run.has(TRAINER_TOKENS_PER_S)):
        return None
    figure = new_figure("tokens / s")
    add_line(figure, run, "samplers", run.column(SAMPLER_TOKENS_PER_S), ORANGE, markers=True)
    add_line(figure, run, "trainer", run.column(TRAINER_TOKENS_PER_S), BLUE, markers=True)
    scale_y_axis(figure, run, [SAMPLER_TOKENS_PER_S, TRAINER_TOKENS_PER_S])
    return figure


def draw_times(run: Run) -> Any:
    """The trainer's wall time by what it is spent on."""
    names = sorted(
        name
        for name in {name for row in run.rows for name in row}
        if name.startswith(TIME_PREFIX)
        and name.endswith("_s")
        and name != TIME_STEP_S
        and any(run.column(name))
    )
    if not names:
        return None
    names.sort(key=lambda name: name != TIME_WAIT_S)
    figure = new_figure("seconds")
    for index, name in enumerate(names):
        figure.add_bar(
            x=steps_of(run),
            y=run.column(name),
            name=name.removeprefix(TIME_PREFIX).removesuffix("_s"),
            marker={"color": STACK[index % len(STACK)]},
        )
    figure.update_layout(barmode="stack", bargap=0.25)
    return figure


def draw_metric(metric: Metric, plot: Plot, run: Run) -> Any:
    """One metric as a line, for a metric that has a `plot` in the catalogue."""
    if not run.has(metric):
        return None
    figure = new_figure(metric.unit)
    add_line(figure, run, plot.label, run.column(metric), BLUE, shape=plot.shape, markers=True)
    mark_resyncs(figure, run)
    figure.update_yaxes(rangemode="tozero")
    return figure


def _metric_panels() -> list[Panel]:
    plots = [(metric, metric.plot) for metric in all_metrics().values()]
    return [
        Panel(metric.replace("/", "-"), plot.title, plot.note, partial(draw_metric, metric, plot))
        for metric, plot in plots
        if plot is not None
    ]


def panels() -> list[Panel]:
    """All panels of the page, in its order."""
    return [*FIRST, *_metric_panels(), *LAST]


FIRST = [
    Panel(
        "reward",
        "Reward",
        "Mean over the batch, including responses that could not be scored.",
        draw_reward,
    ),
    Panel(
        "ess",
        "Effective sample size of the lag ratio",
        "Share of n. 1 after a resync; falls as the trainer moves away from the sampler's weights.",
        draw_ess,
    ),
    Panel("lag", "Lag variance", "Of log pi_theta - log pi_s on the sampled tokens.", draw_lag_variance),
    Panel(
        "prediction",
        "ESS against its Gaussian prediction",
        "Points below the curve have heavier tails than a Gaussian log ratio.",
        draw_prediction,
    ),
    Panel(
        "discrepancy",
        "Engine discrepancy",
        "Sampler against trainer on the same tokens and weights; should not grow with training.",
        draw_discrepancy,
    ),
]
LAST = [
    Panel(
        "throughput",
        "Throughput",
        "Tokens generated by all samplers; tokens scored and trained by the trainer.",
        draw_throughput,
    ),
    Panel("times", "Trainer time per step", "Time spent waiting for rollouts is grey.", draw_times),
]


def running_mean(values: list[float | None], window: int) -> list[float | None]:
    """Mean of the last `window` values up to each position, without missing ones."""
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        recent = [value for value in values[max(0, end - window) : end] if value is not None]
        means.append(sum(recent) / len(recent) if recent else None)
    return means


def _pairs(run: Run, x_metric: str, y_metric: str) -> list[tuple[float, float]]:
    columns = zip(run.column(x_metric), run.column(y_metric), strict=True)
    return [(x, y) for x, y in columns if x is not None and y is not None]
