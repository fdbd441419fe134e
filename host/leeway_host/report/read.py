"""Reads the output directory of a run, including that of a run that failed or is still in progress."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leeway.checks.board import FILE_NAME as CHECKS_FILE
from leeway.checks.board import Records, read_records
from leeway.errors import UsageError
from leeway.metrics.areas.lag import LAG_ESS_TOK
from leeway.metrics.areas.resync import SYNC_REASON, VERDICT_ACTION

Row = dict[str, Any]

DEFAULT_ESS_THRESHOLD = 0.5


class ReportError(UsageError, ValueError):
    """The directory is missing or is not a run's output directory."""


@dataclass(frozen=True)
class Run:
    """Contents of a run's output directory."""

    directory: Path
    rows: list[Row]
    """Lines of metrics.jsonl, by step."""
    summary: dict[str, Any]
    """summary.json; empty if there is none."""
    config: dict[str, Any]
    config_text: str
    problems: list[str] = field(default_factory=list)
    """Files and lines that are missing or unreadable, as text for the page."""
    checks: Records = field(default_factory=dict)
    """Results of the infrastructure checks; empty if none were recorded."""

    @property
    def resyncs(self) -> list[dict[str, Any]]:
        """{step, version, reason, ess} of every resync, from summary.json or else from the metrics."""
        listed = self.summary.get("resyncs")
        if isinstance(listed, list):
            return listed
        return [
            {
                "step": row["step"],
                "version": None,
                "reason": row.get(SYNC_REASON),
                "ess": row.get(LAG_ESS_TOK),
            }
            for row in self.rows
            if row.get(VERDICT_ACTION) == "resync"
        ]

    @property
    def ess_threshold(self) -> float | None:
        """`sync.ess_threshold`; None if it is switched off."""
        sync = self.config.get("sync")
        if isinstance(sync, dict) and "ess_threshold" in sync:
            return _finite(sync["ess_threshold"])
        return DEFAULT_ESS_THRESHOLD

    def setting(self, section: str, key: str) -> Any:
        """A value of the configuration; None if it is missing."""
        values = self.config.get(section)
        return values.get(key) if isinstance(values, dict) else None

    def column(self, metric: str) -> list[float | None]:
        """One value per row; None where the metric is missing or not finite."""
        return [_finite(row.get(metric)) for row in self.rows]

    def has(self, metric: str) -> bool:
        """True if any row has a value of `metric`."""
        return any(value is not None for value in self.column(metric))


def read_run(directory: str | Path) -> Run:
    """Read metrics.jsonl, summary.json and config.yaml of a directory; at least one of them must exist.

    Raises ReportError otherwise.
    """
    path = Path(directory)
    if not path.is_dir():
        raise ReportError(f"{path} is not a directory (looked in {Path.cwd()})")
    if not any((path / name).is_file() for name in ("metrics.jsonl", "summary.json", "config.yaml")):
        raise ReportError(
            f"{path} has no metrics.jsonl, summary.json or config.yaml; expected a run's output directory"
        )
    problems: list[str] = []
    rows = _read_rows(path / "metrics.jsonl", problems)
    summary = _read_summary(path / "summary.json", problems)
    config_text = _read_text(path / "config.yaml", problems)
    config = _parse_config(config_text, problems)
    try:
        checks = read_records(path / CHECKS_FILE)
    except UsageError as error:
        problems.append(str(error))
        checks = {}
    return Run(path, rows, summary, config, config_text, problems, checks)


def _read_rows(path: Path, problems: list[str]) -> list[Row]:
    by_step: dict[int, Row] = {}
    for number, line in enumerate(_read_text(path, problems).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            by_step[int(row["step"])] = row
        except (ValueError, KeyError, TypeError):
            problems.append(f"{path.name}, line {number} is not a step's metrics (cut off?) and is left out")
    return [by_step[step] for step in sorted(by_step)]


def _read_summary(path: Path, problems: list[str]) -> dict[str, Any]:
    text = _read_text(path, problems)
    try:
        summary = json.loads(text) if text else {}
    except ValueError as error:
        problems.append(f"{path.name} is not JSON ({error})")
        return {}
    if not isinstance(summary, dict):
        problems.append(f"{path.name} is not a JSON object")
        return {}
    return summary


def _read_text(path: Path, problems: list[str]) -> str:
    if not path.is_file():
        problems.append(f"{path.name} is missing")
        return ""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror})")
        return ""


def _parse_config(text: str, problems: list[str]) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(text) if text else {}
    except yaml.YAMLError:
        problems.append("config.yaml is not YAML")
        return {}
    return config if isinstance(config, dict) else {}


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
