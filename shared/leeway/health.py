"""/healthz and /readyz of a service whose loop is no event loop, from a thread of their own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from leeway.errors import UsageError


class Health:
    """What a service says about itself; its loop writes, the probes read."""

    def __init__(self) -> None:
        self.alive: Callable[[], bool] = lambda: True
        """Status 503 of /healthz when false."""
        self.ready: dict[str, Any] = {"ready": False}
        """Body of /readyz; the status is 200 or 503 by its key `ready`."""


@contextmanager
def serve_health(health: Health, port: int, host: str = "0.0.0.0") -> Iterator[int]:
    """Serve both within the context and give the port; `port` 0: a free one.

    Raises UsageError when the port cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {"/healthz": {"healthy": health.alive()}, "/readyz": health.ready}
            body = pages.get(self.path)
            good = body is not None and bool(body.get("ready", body.get("healthy")))
            self.send_response(404 if body is None else 200 if good else 503)
            self.send_header("Content-Type", "application/json")
            with suppress(ConnectionError):  # a probe that did not wait
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            return  # probes come every few seconds

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as exc:
        raise UsageError(f"--port {port}: cannot be used on {host}: {exc.strerror}") from exc
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.2,), name="health", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
