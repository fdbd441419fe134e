"""`leeway report DIR`: one self-contained HTML page of a run, from what the run left behind."""

from leeway.report.page import write_report
from leeway.report.read import ReportError

__all__ = ["ReportError", "write_report"]
