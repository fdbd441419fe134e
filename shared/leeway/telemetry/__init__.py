"""Telemetry of the services: spans over OTLP, Prometheus metrics, structured logs."""
