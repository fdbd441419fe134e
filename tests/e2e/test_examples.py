"""The example configurations do what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_support import ROOT, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.fixture
def run_example(tmp_path: Path):  # type: ignore[no-untyped-def]
    runs: list[Run] = []

    def run(name: str) -> Run:
        started = Run(
            tmp_path / "cache", tmp_path / "run", ROOT / "examples" / name, "--out", str(tmp_path / "run")
        )
        runs.append(started)
        code, output = started.finish(1400)
        assert code == 0, output
        started.assert_nothing_left()
        return started

    yield run
    for started in runs:
        started.kill_everything()


def check_after_resyncs(run: Run) -> None:
    """Fresh weights: sampler and trainer agree to bfloat16, and nothing lags."""
    fresh = [row for row in run.rows() if row["lag/age"] == 0]
    assert fresh
    for row in fresh:
        assert row["disc/abs_mean"] < 0.02, row["step"]
        assert row["lag/ess_tok"] > 0.98, row["step"]


def test_tiny_learns_within_its_run(run_example) -> None:  # type: ignore[no-untyped-def]
    run = run_example("tiny.yaml")
    summary = run.summary()
    quarter = max(1, len(summary["reward"]) // 4)
    assert mean(summary["reward"][-quarter:]) >= mean(summary["reward"][:quarter]) + 0.1
    assert summary["resyncs"]
    check_after_resyncs(run)


def test_stress_resyncs_because_of_ess(run_example) -> None:  # type: ignore[no-untyped-def]
    run = run_example("tiny-stress.yaml")
    reasons = {resync["reason"] for resync in run.summary()["resyncs"]}
    assert reasons == {"ess"}
    check_after_resyncs(run)


def test_quickstart_learns_within_its_run(run_example) -> None:  # type: ignore[no-untyped-def]
    run = run_example("quickstart.yaml")
    summary = run.summary()
    quarter = max(1, len(summary["reward"]) // 4)
    assert mean(summary["reward"][-quarter:]) > mean(summary["reward"][:quarter])
    assert summary["resyncs"]
    check_after_resyncs(run)
