"""Spans over OTLP. Stream entries carry the W3C context of the span that published them.

    controller  plan batch ---- ticket (one per response) --.          verdict (in the report's trace)
    sampler                      generate, reward, publish <'                ^
    trainer     step (links to its rollouts' tickets) --- report ------------'
                  '- assemble, score, train, optimizer, checkpoint, publish weights --.
    sampler     apply weights (links to the broadcast) <-----------------------------'

Tracing is off unless OTEL_EXPORTER_OTLP_ENDPOINT (or its variant for traces) or telemetry.otlp_endpoint names
a receiver. While it is off, the SDK is not imported and a span costs one function call.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from leeway.config import TelemetryConfig

log = logging.getLogger(__name__)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
FLUSH_S = 5.0
"""Maximum time that a service spends on exporting pending spans when it ends."""
QUEUE = 1 << 15
"""Maximum number of spans that are queued for export; a batch creates a few per response."""
Kind = Literal["internal", "producer", "consumer", "client"]
_on = False


def trace_settings(config: TelemetryConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """The OTEL_* variables to trace with, or None if tracing is off.

    The environment takes precedence, as OpenTelemetry specifies; telemetry.otlp_endpoint applies if the
    environment names no endpoint. Port 4317 without a protocol means gRPC.
    """
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    base = environ.get(ENDPOINT) or config.otlp_endpoint
    endpoint = environ.get(TRACES_ENDPOINT) or base
    if not endpoint:
        return None
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), None)
    if protocol is None:
        protocol = "grpc" if endpoint.rstrip("/").endswith(":4317") else "http/protobuf"
    if protocol == "http/protobuf" and not environ.get(TRACES_ENDPOINT):
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    return {TRACES_ENDPOINT: endpoint, PROTOCOLS[0]: protocol}


def start_tracing(
    config: TelemetryConfig, service: str, instance: str, run: str, links: int = 128
) -> Callable[[], None]:
    """Start to export spans, if tracing is on; returns a function that flushes them and stops.

    Call it once per process, after any fork. `service`: sampler, trainer or controller; `links`: maximum
    number of links of one span. Raises UsageError for an unknown protocol.
    """
    settings = trace_settings(config)
    if settings is None:
        return lambda: None
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from leeway import __version__
    from leeway.telemetry.parents_first import ParentsFirst

    os.environ.setdefault("OTEL_SERVICE_NAME", f"leeway-{service}")
    os.environ.update(settings)
    resource = Resource.create(
        {"service.instance.id": instance, "service.version": __version__, "leeway.run": run}
    )
    limit = None if "OTEL_SPAN_LINK_COUNT_LIMIT" in os.environ else max(128, links)
    provider = TracerProvider(resource=resource, span_limits=SpanLimits(max_links=limit))
    queue = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else QUEUE
    batches = BatchSpanProcessor(_exporter(settings[PROTOCOLS[0]]), max_queue_size=queue)
    provider.add_span_processor(ParentsFirst(batches))
    trace.set_tracer_provider(provider)
    logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)  # vLLM tries to set a second provider
    global _on
    _on = True
    log.info("traces go to %s (%s)", settings[TRACES_ENDPOINT], settings[PROTOCOLS[0]])

    def stop() -> None:
        provider.force_flush(int(FLUSH_S * 1000))
        provider.shutdown()

    return stop


def _exporter(protocol: str) -> Any:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http()
    from leeway.errors import UsageError

    raise UsageError(f"{PROTOCOLS[0]}={protocol}: expected grpc or http/protobuf")


def tracing() -> bool:
    """Whether spans are exported."""
    return _on


@contextmanager
def span(
    name: str,
    attributes: Mapping[str, Any] | None = None,
    *,
    kind: Kind = "internal",
    parent: str | None = None,
    links: Sequence[str | None] = (),
    root: bool = False,
    began: float | None = None,
) -> Iterator[Span | None]:
    """Open a span around the block; yields None if tracing is off.

    `parent`: a traceparent; by default the current span, or none with `root`. `links`: traceparents.
    `began`: the time.monotonic() at which the span began, if that is in the past. Attributes that are None
    are omitted.
    """
    if not _on:
        yield None
        return
    from opentelemetry import trace
    from opentelemetry.context import Context

    context = Context() if root else None if parent is None else _context(parent)
    start = None if began is None else time.time_ns() - int((time.monotonic() - began) * 1e9)
    linked = [trace.get_current_span(_context(link)).get_span_context() for link in links if link]
    with _tracer().start_as_current_span(
        name,
        context=context,
        kind=trace.SpanKind[kind.upper()],
        attributes={key: value for key, value in (attributes or {}).items() if value is not None},
        links=[trace.Link(context) for context in linked if context.is_valid],
        start_time=start,
    ) as opened:
        yield opened


def add_link(opened: Span | None, other: str | None) -> None:
    """Link an open span to the span of traceparent `other`, if both exist."""
    if opened is None or not other:
        return
    from opentelemetry import trace

    opened.add_link(trace.get_current_span(_context(other)).get_span_context())


def traceparent() -> str | None:
    """W3C traceparent of the current span, for a stream entry; None if tracing is off."""
    if not _on:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent")


@lru_cache(maxsize=1)
def _tracer() -> Tracer:
    from opentelemetry import trace

    return trace.get_tracer("leeway")  # cached: it costs as much as a span


@lru_cache(maxsize=1 << 12)
def _context(parent: str) -> Context:
    """Parse a traceparent; cached, since several spans of a ticket share one."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent}, Context())


def messaging(operation: str, stream: str, message_id: str | None = None) -> dict[str, Any]:
    """Attributes of a message, by OpenTelemetry's semantic conventions; operation: send, receive, process."""
    return {
        "messaging.system": "redis",
        "messaging.destination.name": stream,
        "messaging.operation.type": operation,
        "messaging.operation.name": operation,
        "messaging.message.id": message_id,
    }
