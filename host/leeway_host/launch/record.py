"""The files of a run: metrics.jsonl, with one line per step, and summary.json, which is always written."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from leeway.checkpoints.disk import sync
from leeway.config import RunConfig
from leeway.messages import ReportHeader, SamplerStatus, VerdictHeader
from leeway.metrics import all_metrics
from leeway.metrics.areas.lag import ESS_BY_LEVEL
from leeway.metrics.areas.resync import SYNC_REASON, VERDICT_ACTION, WEIGHTS_VERSION
from leeway.metrics.areas.sampler import SAMPLER_TOKENS_PER_S
from leeway.metrics.areas.time import TIME_STEP_S, TIME_WAIT_S
from leeway.metrics.areas.tokens import TOKENS, TOKENS_VOIDED
from leeway_host.launch.reasons import Reason, next_step

Row = dict[str, Any]
SUMMARY_FILE = "summary.json"


def write_atomic(path: Path, text: str) -> None:
    """Replace a file in one rename, so that neither a reader nor a crash ever leaves a partial one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def read_rows(path: Path) -> list[Row]:
    """Rows of a metrics.jsonl, without a last line that was cut off by a crash."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _read_summary(path: Path) -> Row:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return summary if isinstance(summary, dict) else {}


class SamplerTotals:
    """Sums over samplers of counters that restart at 0 when a sampler restarts."""

    def __init__(self) -> None:
        self._last: dict[str, SamplerStatus] = {}
        self._done = {"tokens": 0.0, "tokens_voided": 0.0, "busy_s": 0.0, "uptime_s": 0.0}

    def update(self, statuses: Iterable[SamplerStatus]) -> None:
        """Add the current heartbeats."""
        for status in statuses:
            before = self._last.get(status.sampler)
            if before is not None and status.uptime_s < before.uptime_s:
                for name in self._done:
                    self._done[name] += getattr(before, name)
            self._last[status.sampler] = status

    def __getitem__(self, name: str) -> float:
        return self._done[name] + sum(float(getattr(status, name)) for status in self._last.values())


class Recorder:
    """Writes metrics.jsonl and summary.json in `out` from a run's reports and verdicts."""

    def __init__(self, out: Path, config: RunConfig, run_id: str = "") -> None:
        self.out, self.config, self.run_id = out, config, run_id
        self.samplers = SamplerTotals()
        self.steps = len(self.rows)
        """Number of rows; they are in the file only, because a run may have many."""
        self._before = _read_summary(out / SUMMARY_FILE) if self.steps else {}
        self.started_at = time.monotonic()
        self.check_counts: dict[str, int] = {}
        """Number of infrastructure checks by their worst status so far, as metrics of a step."""
        self._pending: Row | None = None
        self._epoch = -1
        self._tokens_mark = (time.monotonic(), 0.0)

    @property
    def metrics_path(self) -> Path:
        return self.out / "metrics.jsonl"

    @property
    def rows(self) -> list[Row]:
        """The rows written so far, read from the file."""
        return read_rows(self.metrics_path)

    def started(self, next_step: int) -> None:
        """The trainer (re)started before batch `next_step`: drop the rows of the steps it trains again."""
        self._pending = None
        rows = [row for row in self.rows if row["step"] < next_step]
        self.steps = len(rows)
        write_atomic(self.metrics_path, "".join(json.dumps(row) + "\n" for row in rows))

    def step(self, report: ReportHeader) -> None:
        """A step was trained; its row is written with its verdict, and without one before the next step."""
        self.flush()
        self._epoch = report.epoch
        now = time.monotonic()
        since, tokens = self._tokens_mark
        self._tokens_mark = (now, self.samplers["tokens"])
        rate = (self.samplers["tokens"] - tokens) / max(now - since, 1e-6)
        self._pending = {
            "step": report.step,
            "epoch": report.epoch,
            "time": round(time.time(), 3),
            **report.metrics,
            **self.check_counts,
            WEIGHTS_VERSION: report.version,
            SAMPLER_TOKENS_PER_S: round(rate, 1),
        }

    def verdict(self, verdict: VerdictHeader) -> Row | None:
        """Add the verdict to the pending row, write it and return it; None if it is for another step."""
        if self._pending is None or verdict.step != self._pending["step"]:
            return None
        self._pending[VERDICT_ACTION] = verdict.action
        self._pending[SYNC_REASON] = verdict.reason
        return self.flush()

    def flush(self) -> Row | None:
        """Write the pending row, if any, and return it."""
        row, self._pending = self._pending, None
        if row is not None:
            self.steps += 1
            with self.metrics_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return row

    def summary(self, status: str, error: str | None = None, reason: Reason | None = None) -> dict[str, Any]:
        """The summary of everything recorded so far."""
        rows = self.rows
        wall = time.monotonic() - self.started_at
        trainer_time = sum(_number(row, TIME_STEP_S) for row in rows)
        waited = sum(_number(row, TIME_WAIT_S) for row in rows)
        uptime = self.samplers["uptime_s"]
        trained = int(sum(_number(row, TOKENS) for row in rows))
        return {
            "schema_version": 1,
            "status": status,
            "error": error,
            "reason": reason.as_dict() if reason else None,
            "name": self.config.name,
            "run_id": self.run_id,
            "steps": len(rows),
            "method": self.config.correction.method,
            "model": self.config.model.name,
            "seed": self.config.seed,
            "wall_s": round(wall + self._earlier("wall_s"), 1),
            **_per_step(rows),
            "resyncs": [
                {
                    "step": row["step"],
                    "version": row[WEIGHTS_VERSION] + 1,
                    "reason": row.get(SYNC_REASON),
                    "ess": row.get(ESS_BY_LEVEL[self.config.sync.ess_level]),
                }
                for row in rows
                if row.get(VERDICT_ACTION) == "resync"
            ],
            # Samplers count with their heartbeats, which may lag behind the last batch.
            "tokens_generated": max(
                int(self.samplers["tokens"] + self._earlier("tokens_generated")), trained
            ),
            "tokens_trained": trained,
            "tokens_voided": int(
                self._earlier("tokens_voided")
                + self.samplers["tokens_voided"]
                + sum(_number(row, TOKENS_VOIDED) for row in rows if row["epoch"] == self._epoch)
            ),
            "sampler_busy_fraction": round(self.samplers["busy_s"] / uptime, 4) if uptime else None,
            "trainer_busy_fraction": round(1 - waited / trainer_time, 4) if trainer_time else None,
        }

    def _earlier(self, name: str) -> float:
        # The count of the run before it was resumed.
        return _number(self._before, name)

    def finish(
        self, status: str, error: str | None = None, reason: Reason | None = None, *, write: bool = True
    ) -> dict[str, Any]:
        """Write the last row and, if `write`, summary.json; returns the summary.

        A disk error turns the summary's status into failed.
        """
        try:
            self.flush()
            summary = self.summary(status, error, reason)
            if write:
                write_atomic(self.out / SUMMARY_FILE, json.dumps(summary, indent=1) + "\n")
        except OSError as exc:
            cause = f"summary.json cannot be written: {exc.strerror}"
            reason = reason or Reason("launcher", cause, next_step(cause, f"leeway run --resume {self.out}"))
            summary = self.summary("failed", "; ".join(filter(None, [error, cause])), reason)
        return summary


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _per_step(rows: list[Row]) -> dict[str, list[Any]]:
    # Key of the summary -> one value per step.
    shown = [metric for metric in all_metrics().values() if metric.summary is not None]
    return {str(metric.summary): [row.get(metric) for row in rows] for metric in shown}
