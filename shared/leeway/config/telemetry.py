"""The section `telemetry`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leeway.config.base import Section


class TelemetryConfig(Section):
    """Logs, traces and metrics."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: Literal["text", "json"] = "text"
    """json: one object per line, with trace and span ids."""
    otlp_endpoint: str | None = None
    """Where spans are sent, for example http://localhost:4317 (gRPC) or http://localhost:4318 (HTTP).
    OpenTelemetry's variables (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, ...) take precedence; without
    either no spans are sent."""
    metrics_host: str = "127.0.0.1"
    """Address that /metrics listens on; 0.0.0.0: all."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of /metrics (Prometheus) of every service; on one machine the controller uses this port, the
    trainer the next one and the samplers those after it; null: none."""
