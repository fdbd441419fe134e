"""The resync policy: a pure function of what a step measured.

The controller applies it to every report; a trainer that gets no verdict in time applies the same function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from leeway.config import SyncConfig
from leeway.errors import LeewayError


class PolicyError(LeewayError, ValueError):
    """Something that no resync policy can be applied to."""


Reason = Literal["manual", "ess", "clip_fraction", "age", "every_n"]


@dataclass(frozen=True)
class SyncFacts:
    """What the policy looks at, after the optimiser step of batch `step`."""

    step: int
    age: int
    """Optimiser steps that the samplers' weights are behind now."""
    ess_token: float
    """Share of n, from raw lag ratios of the batch."""
    ess_sequence: float
    clip_fraction: float
    manual: bool = False
    last: bool = False
    """No batch follows."""


@dataclass(frozen=True)
class Decision:
    """`reason` is None when the samplers keep their weights."""

    reason: Reason | None

    @property
    def action(self) -> Literal["continue", "resync"]:
        return "continue" if self.reason is None else "resync"


def decide_resync(facts: SyncFacts, sync: SyncConfig) -> Decision:
    """Whether samplers get new weights now, and the first reason that holds.

    Raises PolicyError when a measured number is not finite: no policy can be applied to it.
    """
    for name in ("ess_token", "ess_sequence", "clip_fraction"):
        if not math.isfinite(getattr(facts, name)):
            raise PolicyError(f"step {facts.step}: {name} is {getattr(facts, name)}")
    if facts.last:
        return Decision(None)
    ess = facts.ess_token if sync.ess_level == "token" else facts.ess_sequence
    rules: tuple[tuple[Reason, bool], ...] = (
        ("manual", facts.manual),
        ("ess", sync.ess_threshold is not None and ess < sync.ess_threshold),
        ("clip_fraction", sync.clip_fraction is not None and facts.clip_fraction > sync.clip_fraction),
        ("age", sync.max_age is not None and facts.age >= sync.max_age),
        ("every_n", sync.every_n is not None and (facts.step + 1) % sync.every_n == 0),
    )
    return Decision(next((reason for reason, holds in rules if holds), None))
