"""Prometheus metrics of the controller."""

from __future__ import annotations

from collections.abc import Sequence

from leeway.messages import ReportHeader, SamplerStatus
from leeway.metrics.areas.controller import (
    CONTROLLER_BATCHES_ISSUED,
    CONTROLLER_NEXT_STEP,
    CONTROLLER_RESPONSES_IN_FLIGHT,
    CONTROLLER_SAMPLERS,
    CONTROLLER_VERDICTS,
    CONTROLLER_WEIGHT_VERSION,
    LAG_AGE_STEPS,
)
from leeway.policies import Decision
from leeway.telemetry.prometheus import Exporter
from leeway_controller.state import ControllerState

EXPORTER = Exporter("controller")


def batch_issued() -> None:
    """Record that the tickets of a batch were published."""
    EXPORTER.record(CONTROLLER_BATCHES_ISSUED, 1)


def verdict(decision: Decision, report: ReportHeader) -> None:
    """Record the answer to a step report."""
    EXPORTER.record(CONTROLLER_VERDICTS, 1, decision.action, decision.reason or "none")
    EXPORTER.record(LAG_AGE_STEPS, report.age)
    EXPORTER.record_step(report.metrics)


def observe(state: ControllerState, live: Sequence[SamplerStatus]) -> None:
    """Record the state after one pass of the loop."""
    ready = sum(status.ready for status in live)
    EXPORTER.record(CONTROLLER_NEXT_STEP, state.next_step)
    EXPORTER.record(CONTROLLER_WEIGHT_VERSION, -1 if state.current is None else state.current)
    EXPORTER.record(CONTROLLER_SAMPLERS, ready, "ready")
    EXPORTER.record(CONTROLLER_SAMPLERS, len(live) - ready, "waiting")
    EXPORTER.record(CONTROLLER_RESPONSES_IN_FLIGHT, sum(status.inflight for status in live))
