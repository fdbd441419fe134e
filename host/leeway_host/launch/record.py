"""What a run leaves behind: metrics.jsonl (a line a step) and summary.json (always written)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from leeway.config import RunConfig
from leeway.messages import ReportHeader, SamplerStatus, VerdictHeader

Row = dict[str, Any]
PER_STEP = {
    "reward": "reward/mean",
    "ess_token": "lag/ess_tok",
    "ess_sequence": "lag/ess_seq",
    "lag_var": "lag/var",
    "discrepancy_kl": "disc/kl",
    "weight_age": "lag/age",
    "versions": "weights/version",
}
"""Lists of the summary, one value a step, and the metrics that they come from."""


def write_atomic(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def read_rows(path: Path) -> list[Row]:
    """Rows of a metrics.jsonl; a last line that was cut off by a crash is left out."""
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
    """Sums over samplers of counters that start at 0 again when a sampler restarts."""

    def __init__(self) -> None:
        self._last: dict[str, SamplerStatus] = {}
        self._done = {"tokens": 0.0, "tokens_voided": 0.0, "busy_s": 0.0, "uptime_s": 0.0}

    def update(self, statuses: Iterable[SamplerStatus]) -> None:
        """Take in the current heartbeats."""
        for status in statuses:
            before = self._last.get(status.sampler)
            if before is not None and status.uptime_s < before.uptime_s:
                for name in self._done:
                    self._done[name] += getattr(before, name)
            self._last[status.sampler] = status

    def __getitem__(self, name: str) -> float:
        return self._done[name] + sum(getattr(status, name) for status in self._last.values())


class Recorder:
    """Collects a run's reports and verdicts; `DIR` holds metrics.jsonl and summary.json."""

    def __init__(self, out: Path, config: RunConfig, run_id: str = "") -> None:
        self.out, self.config, self.run_id = out, config, run_id
        self.samplers = SamplerTotals()
        self.rows = read_rows(self.metrics_path)
        self._before = _read_summary(out / "summary.json") if self.rows else {}
        self.started_at = time.monotonic()
        self.check_counts: dict[str, int] = {}
        """Measures of the infrastructure checks by their worst status so far, as metrics."""
        self._waiting: Row | None = None
        self._epoch = -1
        self._tokens_mark = (time.monotonic(), 0.0)

    @property
    def metrics_path(self) -> Path:
        return self.out / "metrics.jsonl"

    def started(self, next_step: int) -> None:
        """The trainer (re)started before batch `next_step`: later rows are of a past that was lost."""
        self._waiting = None
        self.rows = [row for row in self.rows if row["step"] < next_step]
        write_atomic(self.metrics_path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def step(self, report: ReportHeader) -> None:
        """A step was trained; its row is written with its verdict, or at the latest before the next step."""
        self.flush()
        self._epoch = report.epoch
        now = time.monotonic()
        since, tokens = self._tokens_mark
        self._tokens_mark = (now, self.samplers["tokens"])
        rate = (self.samplers["tokens"] - tokens) / max(now - since, 1e-6)
        self._waiting = {
            "step": report.step,
            "epoch": report.epoch,
            "time": round(time.time(), 3),
            **report.metrics,
            **self.check_counts,
            "weights/version": report.version,
            "sampler/tokens_per_s": round(rate, 1),
        }

    def verdict(self, verdict: VerdictHeader) -> Row | None:
        """The verdict on the waiting row; returns the finished row."""
        if self._waiting is None or verdict.step != self._waiting["step"]:
            return None
        self._waiting["verdict/action"] = verdict.action
        self._waiting["sync/reason"] = verdict.reason
        return self.flush()

    def flush(self) -> Row | None:
        """Write the waiting row, if any."""
        row, self._waiting = self._waiting, None
        if row is not None:
            self.rows.append(row)
            with self.metrics_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return row

    def summary(self, status: str, error: str | None = None) -> dict[str, Any]:
        """The summary of what was recorded so far."""
        rows = self.rows
        wall = time.monotonic() - self.started_at
        trainer_time = sum(_number(row, "time/step_s") for row in rows)
        waited = sum(_number(row, "time/wait_s") for row in rows)
        uptime = self.samplers["uptime_s"]
        trained = int(sum(_number(row, "tokens") for row in rows))
        return {
            "schema_version": 1,
            "status": status,
            "error": error,
            "name": self.config.name,
            "run_id": self.run_id,
            "steps": len(rows),
            "method": self.config.correction.method,
            "model": self.config.model.name,
            "seed": self.config.seed,
            "wall_s": round(wall + self._earlier("wall_s"), 1),
            **{name: [row.get(metric) for row in rows] for name, metric in PER_STEP.items()},
            "resyncs": [
                {
                    "step": row["step"],
                    "version": row["weights/version"] + 1,
                    "reason": row.get("sync/reason"),
                    "ess": row.get(_ess_metric(self.config)),
                }
                for row in rows
                if row.get("verdict/action") == "resync"
            ],
            # Samplers tell theirs with a heartbeat, which may not have come yet for the last batch.
            "tokens_generated": max(
                int(self.samplers["tokens"] + self._earlier("tokens_generated")), trained
            ),
            "tokens_trained": trained,
            "tokens_voided": int(
                self._earlier("tokens_voided")
                + self.samplers["tokens_voided"]
                + sum(_number(row, "tokens/voided") for row in rows if row["epoch"] == self._epoch)
            ),
            "sampler_busy_fraction": round(self.samplers["busy_s"] / uptime, 4) if uptime else None,
            "trainer_busy_fraction": round(1 - waited / trainer_time, 4) if trainer_time else None,
        }

    def _earlier(self, name: str) -> float:
        # What the run had counted before it was resumed.
        return _number(self._before, name)

    def finish(self, status: str, error: str | None = None, write: bool = True) -> dict[str, Any]:
        """The summary, also as summary.json unless `write` is false or the disk refuses."""
        try:
            self.flush()
            summary = self.summary(status, error)
            if write:
                write_atomic(self.out / "summary.json", json.dumps(summary, indent=1) + "\n")
        except OSError as exc:
            summary = self.summary("failed", f"{error or ''}; summary.json cannot be written: {exc.strerror}")
        return summary


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _ess_metric(config: RunConfig) -> str:
    return "lag/ess_tok" if config.sync.ess_level == "token" else "lag/ess_seq"
