"""The catalogue of metrics: every number that Leeway reports, with its unit and its meaning, in one place.

    areas/lag.py  LAG_ESS_TOK = Metric("lag/ess_tok", unit=..., help=..., ...)   the only place with the name
                       |
      +----------------+---------------+------------------+------------------+----------------+
    trainer's report  /metrics     table of `leeway run`  summary.json     `leeway report`  docs/metrics.md

A metric is the string of its name, so a constant is used where the name would be: `metrics[LAG_ESS_TOK]`.
"""

from __future__ import annotations

from leeway.metrics.catalogue import AREAS, all_metrics, find_metric, status_metrics
from leeway.metrics.metric import Column, Metric, MetricFamily, Plot, Series, service_metric
from leeway.metrics.step_data import StepData, measure

__all__ = [
    "AREAS",
    "Column",
    "Metric",
    "MetricFamily",
    "Plot",
    "Series",
    "StepData",
    "all_metrics",
    "find_metric",
    "measure",
    "service_metric",
    "status_metrics",
]
