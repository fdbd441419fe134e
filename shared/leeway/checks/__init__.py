"""Infrastructure checks: they detect data that is off-policy without any formula noticing, during the run.

Pure functions of facts (`facts.py`), one module per check. `Monitor` runs them, `board` stores their results.
"""

from __future__ import annotations

from leeway.checks.board import CheckRecord
from leeway.checks.catalogue import CATALOGUE
from leeway.checks.monitor import Monitor
from leeway.checks.result import CheckResult

__all__ = ["CATALOGUE", "CheckRecord", "CheckResult", "Monitor"]
