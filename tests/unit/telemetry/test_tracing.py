"""When spans are sent, and where; nothing of the SDK without a receiver."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from leeway.config import TelemetryConfig
from leeway.telemetry.logs import JsonFormatter, TextFormatter, redact
from leeway.telemetry.parents_first import ParentsFirst
from leeway.telemetry.tracing import TRACES_ENDPOINT, span, start_tracing, trace_settings, traceparent

BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


@pytest.mark.parametrize(
    ("endpoint", "environ", "want"),
    [
        (None, {}, None),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, None),
        ("http://c:4318", {"OTEL_TRACES_EXPORTER": "none"}, None),
        ("http://c:4318", {}, ("http://c:4318/v1/traces", "http/protobuf")),
        ("http://c:4317", {}, ("http://c:4317", "grpc")),
        ("http://c:4317/", {}, ("http://c:4317/", "grpc")),
        ("http://c:1", {BASE: "http://d:4318/"}, ("http://d:4318/v1/traces", "http/protobuf")),
        (None, {TRACES_ENDPOINT: "http://d/x"}, ("http://d/x", "http/protobuf")),
        (None, {BASE: "http://d:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ("http://d:9", "grpc")),
    ],
)  # fmt: skip
def test_the_environment_comes_first(
    endpoint: str | None, environ: dict[str, str], want: tuple[str, str] | None
) -> None:
    got = trace_settings(TelemetryConfig(otlp_endpoint=endpoint), environ)
    assert (got and (got[TRACES_ENDPOINT], got[PROTOCOL])) == want


def test_off_costs_nothing() -> None:
    code = """
import sys
from leeway.config import TelemetryConfig
from leeway.telemetry.tracing import span, start_tracing, traceparent
start_tracing(TelemetryConfig(), "trainer", "t", "run")()
with span("step", {"a": 1}, links=["x"]) as opened:
    assert opened is None and traceparent() is None
print([m for m in sys.modules if m.startswith(("opentelemetry", "grpc"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    monkeypatch.setenv(TRACES_ENDPOINT, "http://c")  # setenv: what start_tracing sets is undone
    monkeypatch.setenv(PROTOCOL, "http/json")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "x")
    with pytest.raises(Exception, match="expected grpc or http/protobuf"):
        start_tracing(TelemetryConfig(), "trainer", "t", "run")
    with span("still off") as opened:
        assert opened is None
    assert traceparent() is None


def test_passwords_do_not_get_into_logs() -> None:
    record = logging.LogRecord(
        "x", logging.INFO, "", 0, "connecting to redis://user:%s@host:6379/0", ("hun:ter2",), None
    )
    for formatter in (TextFormatter("trainer"), JsonFormatter("trainer")):
        line = formatter.format(record)
        assert "ter2" not in line
        assert "redis://user:***@host:6379/0" in line
    assert json.loads(JsonFormatter("trainer").format(record))["service"] == "trainer"
    assert redact("no secret here: a@b") == "no secret here: a@b"
    assert redact("rediss://:pw@h and redis://h") == "rediss://:***@h and redis://h"


def test_no_span_is_sent_before_its_parent() -> None:
    """A process may be killed after any export; what was sent until then must have no orphan."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(ParentsFirst(SimpleSpanProcessor(exporter)))
    tracer = provider.get_tracer("test")

    def sent() -> list[str]:
        return [span.name for span in exporter.get_finished_spans()]

    remote = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    with tracer.start_as_current_span("top", set_span_in_context(NonRecordingSpan(remote))) as top:
        with tracer.start_as_current_span("middle"):
            with tracer.start_as_current_span("low"):
                pass
            late = tracer.start_span("late")
            assert sent() == []
        assert sent() == [], "its parent is open"
        tracer.start_span("of another trace", Context()).end()
        assert sent() == ["of another trace"]
    assert sent()[1:] == ["top", "middle", "low"]
    late.end()
    tracer.start_span("later", set_span_in_context(top)).end()
    assert sent()[4:] == ["late", "later"], "their parents have been sent"
