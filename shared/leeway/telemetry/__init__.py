"""What a run tells about itself: spans over OTLP, Prometheus metrics, structured logs."""
