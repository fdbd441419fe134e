"""Infrastructure checks: what would make data off-policy behind the algorithm's back, measured as a run goes.

Pure functions of facts (`facts.py`), one module a check; `Monitor` runs them, `board` keeps their results.
"""

from __future__ import annotations

from leeway.checks.board import CheckRecord
from leeway.checks.catalogue import CATALOGUE
from leeway.checks.monitor import Monitor
from leeway.checks.result import CheckResult

__all__ = ["CATALOGUE", "CheckRecord", "CheckResult", "Monitor"]
