"""The list of findings, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from leeway.errors import EXIT_OK, EXIT_USAGE
from leeway.findings import LEVELS, Finding, order_findings

STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan", "ok": "green"}
INDENT = 9


def describe(findings: Sequence[Finding]) -> Text:
    """Two lines per finding, the worst first: what was found, and what to do."""
    text = Text()
    for finding in order_findings(findings):
        text.append(f"{finding.level:<{INDENT}}", STYLES[finding.level])
        text.append(f"{finding.check}: {finding.text}\n")
        if finding.next_step:
            text.append(f"{'':<{INDENT}}-> {finding.next_step}\n", "dim")
    text.append(count(findings), "bold")
    return text


def plain(finding: Finding) -> str:
    """A finding in one line."""
    step = f" -> {finding.next_step}" if finding.next_step else ""
    return f"{finding.level}: {finding.check}: {finding.text}{step}"


def count(findings: Sequence[Finding]) -> str:
    """`1 error, 2 warnings, 14 ok`"""
    numbers = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    plural = {"error": "errors", "warning": "warnings"}
    words = [
        f"{number} {plural.get(level, level) if number != 1 else level}"
        for level, number in numbers.items()
        if number
    ]
    return ", ".join(words) or "nothing was checked"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """For --json."""
    worst = order_findings(findings)
    return {"status": worst[0].level if worst else "ok", "findings": [asdict(finding) for finding in worst]}


def exit_code(findings: Sequence[Finding]) -> int:
    """2 when there is an error: the run would end with the same status."""
    return EXIT_USAGE if any(finding.level == "error" for finding in findings) else EXIT_OK
