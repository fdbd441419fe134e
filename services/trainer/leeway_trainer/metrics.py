"""Prometheus metrics of the trainer, exposed by rank 0."""

from __future__ import annotations

from collections.abc import Mapping

from leeway.metrics.areas.trainer import TRAINER_STEPS
from leeway.telemetry.prometheus import Exporter

EXPORTER = Exporter("trainer")


def observe(event: str, metrics: Mapping[str, float | str]) -> None:
    """Record a report that is about to be published."""
    if event == "step":
        EXPORTER.record(TRAINER_STEPS, 1)
        EXPORTER.record_step(metrics)
