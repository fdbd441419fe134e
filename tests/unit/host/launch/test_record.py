"""What a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

from leeway.config.load import build_config
from leeway.messages import ReportHeader, SamplerStatus, VerdictHeader
from leeway_host.launch.record import Recorder, SamplerTotals, read_rows

CONFIG = build_config({"task": {"kind": "digits"}, "name": "t"})


def report(step: int, version: int = 1, **metrics: float) -> ReportHeader:
    values = {"reward/mean": step / 10, "lag/ess_tok": 0.9, "lag/age": step, "tokens": 100, **metrics}
    return ReportHeader(event="step", epoch=0, step=step, version=version, metrics=values)


def verdict(step: int, reason: str | None = None) -> VerdictHeader:
    return VerdictHeader(epoch=0, step=step, action="resync" if reason else "continue", reason=reason)


def test_rows_carry_their_verdict(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, CONFIG)
    recorder.step(report(0))
    assert read_rows(recorder.metrics_path) == []
    row = recorder.verdict(verdict(0, "ess"))
    assert row is not None
    assert row["sync/reason"] == "ess"
    assert recorder.verdict(verdict(0)) is None  # repeated
    recorder.step(report(1, 2))
    recorder.step(report(2, 2))  # no verdict on step 1: its row is written all the same
    summary = recorder.finish("completed")
    rows = read_rows(recorder.metrics_path)
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert "verdict/action" not in rows[1]
    assert summary["resyncs"] == [{"step": 0, "version": 2, "reason": "ess", "ess": 0.9}]
    assert summary["reward"] == [0.0, 0.1, 0.2]
    assert summary["versions"] == [1, 2, 2]
    assert summary["tokens_trained"] == 300
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_a_resumed_run_drops_what_was_lost(tmp_path: Path) -> None:
    first = Recorder(tmp_path, CONFIG)
    for step in range(5):
        first.step(report(step))
        first.verdict(verdict(step))
    second = Recorder(tmp_path, CONFIG)
    second.started(3)
    second.step(report(3, 9))
    summary = second.finish("completed")
    assert [r["step"] for r in read_rows(second.metrics_path)] == [0, 1, 2, 3]
    assert summary["versions"] == [1, 1, 1, 9]


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "rew')
    assert read_rows(path) == [{"step": 0}]


def test_a_run_that_never_started_has_a_summary(tmp_path: Path) -> None:
    summary = Recorder(tmp_path, CONFIG).finish("failed", "no model")
    expected = {
        "status", "steps", "method", "model", "seed", "wall_s", "reward", "ess_token", "ess_sequence",
        "lag_var", "discrepancy_kl", "weight_age", "resyncs", "versions", "tokens_generated",
        "tokens_trained", "tokens_voided", "sampler_busy_fraction", "trainer_busy_fraction",
    }  # fmt: skip
    assert expected <= summary.keys()
    assert (summary["status"], summary["steps"], summary["reward"]) == ("failed", 0, [])


def test_counters_survive_a_restart_of_a_sampler() -> None:
    totals = SamplerTotals()

    def beat(name: str, uptime: float, tokens: int) -> None:
        totals.update([SamplerStatus(sampler=name, heartbeat=0, uptime_s=uptime, tokens=tokens)])

    beat("a", 10, 100)
    beat("b", 10, 50)
    beat("a", 1, 5)
    beat("a", 2, 7)
    assert totals["tokens"] == 157
    assert totals["uptime_s"] == 22
