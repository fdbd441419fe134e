"""A rule of the resync policy, and the facts it judges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel

from leeway.errors import LeewayError
from leeway.metrics.areas.lag import LAG_CLIP_FRACTION, LAG_ESS_SEQ, LAG_ESS_TOK

ESS_TOKEN, ESS_SEQUENCE, CLIP_FRACTION = LAG_ESS_TOK, LAG_ESS_SEQ, LAG_CLIP_FRACTION


class PolicyError(LeewayError, ValueError):
    """Measurements that no resync policy can be applied to, or a rule that failed."""


@dataclass(frozen=True)
class SyncFacts:
    """What a rule judges, after the optimiser step of batch `step`.

    Raises PolicyError if a measured number is not finite: no policy can be applied to it.
    """

    step: int
    age: int
    """Optimiser steps that the samplers' weights are behind now."""
    ess_token: float
    """Effective sample size of the batch's raw lag ratios, as a share of n."""
    ess_sequence: float
    clip_fraction: float
    """Share of tokens whose lag ratio is clipped."""
    manual: bool = False
    """A person asked for a resync (`leeway resync`)."""
    last: bool = False
    """No batch follows."""
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """All numbers that the step reported, by metric name."""

    def __post_init__(self) -> None:
        for name in ("ess_token", "ess_sequence", "clip_fraction"):
            if not math.isfinite(getattr(self, name)):
                raise PolicyError(
                    f"step {self.step}: {name} is {getattr(self, name)}, expected a finite number"
                )


def read_facts(
    metrics: Mapping[str, float | int | str | None],
    *,
    step: int,
    age: int,
    last: bool,
    manual: bool = False,
) -> SyncFacts:
    """The facts in the metrics of a step.

    Raises PolicyError for a metric that is missing, not a number or not finite.
    """
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    for name in (ESS_TOKEN, ESS_SEQUENCE, CLIP_FRACTION):
        if name not in numbers:
            raise PolicyError(f"report of step {step}: {name} is {metrics.get(name)!r}, expected a number")
    return SyncFacts(
        step=step,
        age=age,
        ess_token=numbers[ESS_TOKEN],
        ess_sequence=numbers[ESS_SEQUENCE],
        clip_fraction=numbers[CLIP_FRACTION],
        manual=manual,
        last=last,
        metrics=MappingProxyType(numbers),
    )


@dataclass(frozen=True)
class Policy:
    """One rule. The name it is registered under is the reason that verdicts, metrics and reports show.

    A rule is a pure function: controller and trainer call it on the same facts and must agree.
    """

    wants_resync: Callable[[SyncFacts, Any], bool]
    """(facts, settings) -> whether samplers get new weights now."""
    settings: type[BaseModel] | None = None
    """Model of its section `sync.policies.<name>`. None: no section; it gets the whole section `sync`."""
    order: int = 100
    """Rules with a lower number are asked first; at the same number, by name. Built-in rules use 0 to 40."""


@dataclass(frozen=True)
class Decision:
    """`reason`: name of the rule that asked for a resync; None if samplers keep their weights."""

    reason: str | None

    @property
    def action(self) -> Literal["continue", "resync"]:
        return "continue" if self.reason is None else "resync"
