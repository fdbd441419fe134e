"""Responses of a batch: length, truncation, repetition, entropy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from leeway.metrics.metric import Metric, Plot, Series

if TYPE_CHECKING:
    from leeway.metrics.step_data import StepData


def _length_mean(data: StepData) -> float:
    return math.fsum(data.lengths) / len(data.lengths)


def _length_max(data: StepData) -> float:
    return float(max(data.lengths))


def _truncated(data: StepData) -> float:
    return sum(r.header.finish_reason == "length" for r in data.rollouts) / len(data.rollouts)


RESPONSE_LENGTH_MEAN = Metric(
    "response/length_mean",
    unit="tokens",
    help="Mean response length, including the end-of-sequence token.",
    measure=_length_mean,
    plot=Plot("Response length", "Including the end-of-sequence token.", "mean response length"),
    series=(
        Series("trainer", "leeway_response_mean_tokens", "gauge", "Mean response length of the last batch"),
    ),
)
RESPONSE_LENGTH_MAX = Metric(
    "response/length_max", unit="tokens", help="Longest response of the batch.", measure=_length_max
)
RESPONSE_TRUNCATED_FRACTION = Metric(
    "response/truncated_fraction",
    unit="share",
    help="Share of responses cut off at sampling.max_new_tokens.",
    measure=_truncated,
)
RESPONSE_REPETITION = Metric(
    "response/repetition",
    unit="share",
    help="Mean share of 4-grams that repeat an earlier one of their response (16 tokens or more).",
)
RESPONSE_ENTROPY = Metric("response/entropy", unit="nats", help="Mean of -log mu over drawn tokens.")

METRICS = (
    RESPONSE_LENGTH_MEAN,
    RESPONSE_LENGTH_MAX,
    RESPONSE_TRUNCATED_FRACTION,
    RESPONSE_REPETITION,
    RESPONSE_ENTROPY,
)
