"""Infrastructure checks: number of measures by their worst status so far."""

from __future__ import annotations

from leeway.metrics.metric import Metric

CHECKS_OK = Metric("checks/ok", unit="checks", help="Measures that are ok so far.", measured_by="launcher")
CHECKS_WARN = Metric(
    "checks/warn", unit="checks", help="Measures whose worst status so far is warn.", measured_by="launcher"
)
CHECKS_FAIL = Metric(
    "checks/fail", unit="checks", help="Measures that have failed so far.", measured_by="launcher"
)

METRICS = (CHECKS_OK, CHECKS_WARN, CHECKS_FAIL)
