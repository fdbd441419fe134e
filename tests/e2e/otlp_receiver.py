"""A receiver of OTLP spans over HTTP and gRPC, with OpenTelemetry's own protocol definitions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc


@dataclass(frozen=True)
class Received:
    """One span as it came in."""

    name: str
    service: str
    instance: str
    run: str
    trace: str
    id: str
    parent: str
    links: tuple[tuple[str, str], ...]
    """(trace id, span id)"""
    attributes: dict[str, Any]
    kind: int
    start: int
    end: int


@dataclass
class Receiver:
    """`spans` in order of arrival; `http` and `grpc` are endpoints for OTEL_EXPORTER_OTLP_ENDPOINT."""

    http: str = ""
    grpc: str = ""
    spans: list[Received] = field(default_factory=list)

    def add(self, request: Any) -> None:
        for resource in request.resource_spans:
            about = {a.key: _value(a.value) for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [_received(span, about) for span in scope.spans]

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(v) for v in value.array_value.values]
    return getattr(value, kind) if kind else None


def _received(span: Any, about: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        service=about.get("service.name", ""),
        instance=about.get("service.instance.id", ""),
        run=about.get("leeway.run", ""),
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        attributes={a.key: _value(a.value) for a in span.attributes},
        kind=span.kind,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
    )


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """A receiver on two free ports of this machine."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                receiver.add(pb.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(pb.ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *args: Any) -> None:
            return

    class Service(rpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            receiver.add(request)
            return pb.ExportTraceServiceResponse()

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    server = grpc.server(ThreadPoolExecutor(4))
    rpc.add_TraceServiceServicer_to_server(Service(), server)
    receiver.grpc = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    receiver.http = f"http://127.0.0.1:{web.server_address[1]}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0)
        web.shutdown()
        web.server_close()
