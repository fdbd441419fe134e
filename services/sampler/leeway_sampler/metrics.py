"""What a sampler shows at /metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from leeway_sampler.status import Counters

RESPONSES = Counter(
    "leeway_sampler_responses", "Responses published, and tickets that were void", ["outcome"]
)
TOKENS = Counter(
    "leeway_sampler_generated_tokens", "Tokens drawn; void: of responses not published", ["outcome"]
)
IN_FLIGHT = Gauge("leeway_sampler_responses_in_flight", "Tickets that this sampler works on")
READY = Gauge("leeway_sampler_ready", "1 while it holds the newest version and takes tickets")
VERSION = Gauge("leeway_sampler_weight_version", "Weight version in the engine; -1: none")
BUSY = Counter("leeway_sampler_busy_seconds", "Time with at least one ticket in work")
GENERATE_S = Histogram(
    "leeway_sampler_generate_seconds",
    "From a ticket's start to its response",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900),
)
APPLY_S = Histogram(
    "leeway_sampler_apply_weights_seconds",
    "From a broadcast's manifest to the weights in the engine",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
_told: dict[str, float] = {}


def observe(counters: Counters, ready: bool, version: int | None) -> None:
    """The counters as of now."""
    IN_FLIGHT.set(counters.inflight)
    READY.set(ready)
    VERSION.set(-1 if version is None else version)
    _to(RESPONSES.labels("published"), "responses", counters.tickets)
    _to(RESPONSES.labels("void"), "void", counters.tickets_voided)
    _to(TOKENS.labels("published"), "tokens", counters.tokens - counters.tokens_voided)
    _to(TOKENS.labels("void"), "void_tokens", counters.tokens_voided)
    _to(BUSY, "busy", counters.busy_s)


def _to(counter: Counter, name: str, total: float) -> None:
    counter.inc(max(0.0, total - _told.get(name, 0.0)))
    _told[name] = total
