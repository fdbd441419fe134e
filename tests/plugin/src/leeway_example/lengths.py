"""Metric `response/length_std`: how much the lengths of a batch's responses differ."""

from __future__ import annotations

import statistics

from leeway.metrics import Metric, StepData


def length_std(data: StepData) -> float | None:
    """None for a batch of one response."""
    return statistics.stdev(data.lengths) if len(data.lengths) > 1 else None


METRICS = (
    Metric(
        "response/length_std",
        unit="tokens",
        help="Standard deviation of the response lengths of the batch.",
        measure=length_std,
    ),
)
