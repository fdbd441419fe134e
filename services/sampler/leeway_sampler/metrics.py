"""Prometheus metrics of a sampler."""

from __future__ import annotations

from leeway.metrics.areas.sampler import (
    SAMPLER_APPLY_WEIGHTS_SECONDS,
    SAMPLER_BUSY_SECONDS,
    SAMPLER_GENERATE_SECONDS,
    SAMPLER_GENERATED_TOKENS,
    SAMPLER_READY,
    SAMPLER_RESPONSES,
    SAMPLER_RESPONSES_IN_FLIGHT,
    SAMPLER_WEIGHT_VERSION,
)
from leeway.telemetry.prometheus import Exporter
from leeway_sampler.status import Counters

EXPORTER = Exporter("sampler")


def observe(counters: Counters, ready: bool, version: int | None) -> None:
    """Record the counters as of now."""
    EXPORTER.record(SAMPLER_RESPONSES_IN_FLIGHT, counters.inflight)
    EXPORTER.record(SAMPLER_READY, ready)
    EXPORTER.record(SAMPLER_WEIGHT_VERSION, -1 if version is None else version)
    EXPORTER.record_total(SAMPLER_RESPONSES, counters.tickets, "published")
    EXPORTER.record_total(SAMPLER_RESPONSES, counters.tickets_voided, "void")
    EXPORTER.record_total(SAMPLER_GENERATED_TOKENS, counters.tokens - counters.tokens_voided, "published")
    EXPORTER.record_total(SAMPLER_GENERATED_TOKENS, counters.tokens_voided, "void")
    EXPORTER.record_total(SAMPLER_BUSY_SECONDS, counters.busy_s)


def generated(seconds: float) -> None:
    """Record the time from a ticket's start to its response."""
    EXPORTER.record(SAMPLER_GENERATE_SECONDS, seconds)


def applied(seconds: float) -> None:
    """Record the time from a broadcast's manifest to the weights in the engine."""
    EXPORTER.record(SAMPLER_APPLY_WEIGHTS_SECONDS, seconds)
