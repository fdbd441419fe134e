"""Metrics by area, one module per area; each ends in METRICS. A constant is the metric's name in capitals."""
