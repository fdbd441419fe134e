"""`leeway report DIR`: one self-contained HTML page of a run, from what the run left behind."""

from leeway_host.report.page import write_report
from leeway_host.report.read import ReportError

__all__ = ["ReportError", "write_report"]
