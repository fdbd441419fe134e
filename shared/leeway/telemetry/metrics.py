"""Prometheus /metrics of a service, on a port of its own; no port, no cost.

Names carry their unit, labels are few and bounded; the run is a label of the scrape target, not of each
series.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from leeway.errors import UsageError


def serve_metrics(port: int | None, host: str = "0.0.0.0") -> AbstractContextManager[None]:
    """Serve the process's registry at http://host:port/metrics within the context; None or 0: nowhere.

    Raises UsageError when the port cannot be used.
    """
    return _Server(host, port) if port else nullcontext()


class _Server(AbstractContextManager[None]):
    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    def __enter__(self) -> None:
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(self.port, self.host)
        except OSError as exc:
            raise UsageError(
                f"telemetry.metrics_port: port {self.port} on {self.host} cannot be used: {exc.strerror}"
            ) from exc

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
