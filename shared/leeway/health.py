"""The health server of every service: /healthz and /readyz, served by a thread.

    /healthz   {"healthy": bool}        200, or 503: restart the process
    /readyz    {"ready": bool, ...}     200, or 503: the process does not do its work yet

The service's loop never waits for a probe, whatever kind of loop it is.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from leeway.errors import UsageError


class HealthSource(Protocol):
    """What the health server asks, from its own threads."""

    def alive(self) -> bool:
        """Whether /healthz answers 200."""

    @property
    def ready(self) -> dict[str, Any]:
        """Body of /readyz. Its key `ready` decides between 200 and 503."""


class Health:
    """Health of a service with a blocking loop: the loop sets the attributes, the server reads them."""

    def __init__(self) -> None:
        self.alive: Callable[[], bool] = lambda: True
        self.ready: dict[str, Any] = {"ready": False}


@contextmanager
def serve_health(health: HealthSource, port: int, host: str = "0.0.0.0") -> Iterator[int]:
    """Serve both pages within the context and yield the port; `port` 0 picks a free one.

    Raises UsageError when the port cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body: dict[str, Any] | None = None
            if self.path == "/healthz":
                body = {"healthy": health.alive()}
            elif self.path == "/readyz":
                body = health.ready
            good = body is not None and bool(body.get("ready", body.get("healthy")))
            self.send_response(404 if body is None else 200 if good else 503)
            self.send_header("Content-Type", "application/json")
            with suppress(ConnectionError):  # the probe did not wait for the answer
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            return  # probes come every few seconds

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as exc:
        raise UsageError(
            f"--port {port}: cannot be used for health checks on {host}: {exc.strerror}; choose a free port "
            "(samplers count up from sampler.http_port)"
        ) from exc
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.2,), name="health", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
