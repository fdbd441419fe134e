"""Prometheus: the series of a service, created from the catalogue of metrics, and its /metrics endpoint.

Series names carry their unit; labels are few and bounded. The run is a label of the scrape target and not of
each series.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from leeway.errors import UsageError
from leeway.metrics import Metric, Series, all_metrics
from leeway.metrics.metric import Source

Collector = Gauge | Counter | Histogram


class Exporter:
    """All series of one service. A service has one exporter, since a registry accepts each name once."""

    def __init__(self, service: Source, registry: CollectorRegistry = REGISTRY) -> None:
        self.service = service
        self._collectors: dict[str, Collector] = {}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        for metric in all_metrics().values():
            for series in self._series(metric):
                if series.name not in self._collectors:
                    self._collectors[series.name] = _create(series, registry)

    def record(self, metric: Metric, value: float, *labels: str) -> None:
        """Set the metric's gauges, add to its counters, observe the value in its histograms.

        `labels`: values of the labels that the metric leaves open.
        """
        for series in self._series(metric):
            collector = self._collectors[series.name]
            values = series.values or labels
            child = collector.labels(*values) if series.labels else collector
            if isinstance(child, Gauge):
                child.set(value)
            elif isinstance(child, Counter):
                child.inc(value)
            else:
                child.observe(value)

    def record_total(self, metric: Metric, total: float, *labels: str) -> None:
        """Raise a counter to a running total; a total that falls adds nothing."""
        before = self._totals.get((metric, labels), 0.0)
        self._totals[metric, labels] = total
        self.record(metric, max(0.0, total - before), *labels)

    def record_step(self, metrics: Mapping[str, object]) -> None:
        """Feed every series that the metrics of a step belong to; missing ones add 0 to their counters."""
        for metric in all_metrics().values():
            if not metric.recorded:
                continue
            value = metrics.get(metric)
            if isinstance(value, (int, float)):
                self.record(metric, float(value))
            elif any(series.kind == "counter" for series in self._series(metric)):
                self.record(metric, 0.0)

    def _series(self, metric: Metric) -> list[Series]:
        return [series for series in metric.series if series.service == self.service]


def _create(series: Series, registry: CollectorRegistry) -> Collector:
    name, text, labels = series.name, series.help, series.labels
    if series.kind == "gauge":
        return Gauge(name, text, labels, registry=registry)
    if series.kind == "counter":
        return Counter(name, text, labels, registry=registry)
    return Histogram(
        name, text, labels, registry=registry, buckets=series.buckets or Histogram.DEFAULT_BUCKETS
    )


def serve_metrics(port: int | None, host: str = "127.0.0.1") -> AbstractContextManager[None]:
    """Serve the process's metrics at http://host:port/metrics within the context; None or 0: do not serve.

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
