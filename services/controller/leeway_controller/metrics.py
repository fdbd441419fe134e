"""What the controller shows at /metrics."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from leeway.messages import ReportHeader, SamplerStatus
from leeway.policies import Decision
from leeway_controller.state import ControllerState

BATCHES = Counter("leeway_controller_batches_issued", "Batches whose tickets were written, again ones too")
VERDICTS = Counter("leeway_controller_verdicts", "Answers to step reports", ["action", "reason"])
STEP = Gauge("leeway_controller_next_step", "The batch that the trainer trains next")
VERSION = Gauge("leeway_controller_weight_version", "The version that all live samplers attested; -1: none")
SAMPLERS = Gauge("leeway_controller_samplers", "Live samplers, by whether they take tickets", ["state"])
IN_FLIGHT = Gauge("leeway_controller_responses_in_flight", "Responses that samplers work on")
ESS = Gauge("leeway_lag_ess_ratio", "Effective sample size of the lag ratio, share of n", ["level"])
AGE = Gauge("leeway_lag_age_steps", "Optimiser steps that samplers are behind")


def verdict(decision: Decision, report: ReportHeader) -> None:
    """A step was answered."""
    VERDICTS.labels(decision.action, decision.reason or "none").inc()
    AGE.set(report.age)
    for level, name in (("token", "lag/ess_tok"), ("sequence", "lag/ess_seq")):
        value = report.metrics.get(name)
        if isinstance(value, (int, float)):
            ESS.labels(level).set(value)


def observe(state: ControllerState, live: Sequence[SamplerStatus]) -> None:
    """The state of one pass of the loop."""
    STEP.set(state.next_step)
    VERSION.set(-1 if state.current is None else state.current)
    ready = sum(status.ready for status in live)
    SAMPLERS.labels("ready").set(ready)
    SAMPLERS.labels("waiting").set(len(live) - ready)
    IN_FLIGHT.set(sum(status.inflight for status in live))
