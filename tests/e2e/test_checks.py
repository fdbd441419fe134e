"""The infrastructure checks on real runs: silent on clean ones, and each loud on the fault that it is for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e_support import ROOT, StartRun

from leeway.checks import CATALOGUE

FAULTS = Path(__file__).parent / "faults"
LEARNS: dict[str, Any] = {
    "model": {"params": {"hidden": 64, "layers": 2, "warmup_steps": 300, "target_accuracy": 0.5}},
    "task": {"reward": "exact"},
    "sync": {"ticket_idle_s": 60.0},
    "batch": {"prompts": 8, "group_size": 8},
    "checks": {"sample_fraction": 1.0, "self_prefix_every": 1},
    "trainer": {"steps": 6, "learning_rate": 1e-3},
}
"""A run that has something to check: a model that knows a little, and steps that change it."""


def doctor(target: str, *args: str) -> tuple[int, dict[str, Any]]:
    """(exit code, results) of `leeway doctor TARGET --json`."""
    command = [sys.executable, "-m", "leeway_host", "doctor", target, "--json", *args]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode in (0, 1), result.stderr
    return result.returncode, json.loads(result.stdout)


def with_status(report: dict[str, Any], status: str) -> dict[str, str]:
    """Measures whose worst status is `status`, with their evidence."""
    return {
        name: record["worst"]["evidence"]
        for name, record in report["checks"].items()
        if record["worst"]["status"] == status
    }


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"top_p": 0.8, "top_k": 12}, {"min_p": 0.1, "top_k": 12, "temperature": 1.3}],
    ids=["plain", "temperature", "top-p", "min-p"],
)
def test_a_clean_run_passes_every_check(start_run: StartRun, sampling: dict[str, Any]) -> None:
    run = start_run(**LEARNS, sampling=sampling)
    code, output = run.finish(900)
    assert code == 0, output
    code, report = doctor(str(run.out))
    assert not with_status(report, "warn")
    assert not with_status(report, "fail")
    assert (code, report["status"]) == (0, "ok")
    # Age within versions needs more steps, repetition longer responses.
    assert set(report["not_measured"]) <= {"deferral/age", "collapse/repetition", "collapse/reward"}
    assert all("checks/fail" in row for row in run.rows()[2:])


PLANTED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "reward_filter reencoded_text": (
        {},
        {
            "reward_filter/groups",
            "reward_filter/rewards",
            "deferral/selection",
            "retokenisation/ids_unchanged",
        },
    ),
    "label_moved": ({}, {"version/resync_took"}),
    # vLLM reads the weight itself, and not the packed kernel, when the output layer is float32. Some clean
    # steps come first: a jump needs a history.
    "stale_tied_head": (
        {
            "sampler": {"engine_args": {"hf_overrides": {"head_dtype": "model"}}},
            "sync": {"max_age": 4},
            "trainer": {"steps": 7, "learning_rate": 3e-3},
        },
        {"numerics/discrepancy"},
    ),
    "first_finished": ({}, {"deferral/outstanding"}),
    "raw_logprobs nan_logprob": (
        {"sampling": {"temperature": 0.6}},
        {
            "sampling_distribution/calibration",
            "sampling_distribution/ratio_mean",
            "numerics/non_finite",
        },
    ),
    "top_p_without_support": ({}, {"sampling_distribution/ratio_mean"}),
}
"""Faults that do not touch each other's measures, so that one run shows several."""


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("faults", PLANTED)
def test_planted_faults_are_found(start_run: StartRun, monkeypatch: pytest.MonkeyPatch, faults: str) -> None:
    sections, expected = PLANTED[faults]
    monkeypatch.setenv("E2E_FAULTS", faults)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAULTS), os.environ.get("PYTHONPATH", "")]))
    run = start_run(**{**LEARNS, **{name: LEARNS.get(name, {}) | over for name, over in sections.items()}})
    code, output = run.finish(900)
    assert code == (1 if "nan_logprob" in faults else 0), output
    monkeypatch.delenv("E2E_FAULTS")
    code, report = doctor(str(run.out))
    found = with_status(report, "fail")
    assert code == 1
    assert expected <= set(found), found
    for name in expected:
        assert f"check {name}: fail" in output, "the run says so while it goes"


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_doctor_asks_a_live_run(start_run: StartRun, redis_server: Any) -> None:
    run = start_run("--redis", redis_server.url, "--steps", "200", **LEARNS)
    run.wait_for(lambda: len(run.rows()) >= 3, 600)
    code, report = doctor(redis_server.url)
    assert (code, report["status"], report["notes"]) == (0, "ok", [])
    assert report["run"].startswith("e2e-")
    probe = report["checks"]["sampling_distribution/probe"]["latest"]
    assert probe["status"] == "ok"
    assert "controller/alive" in report["checks"]
    assert set(report["checks"]) - {"controller/alive"} <= set(CATALOGUE)
    code, again = doctor(redis_server.url, "--name", report["run"])
    assert code == 0
    draws = [
        int(r["checks"]["sampling_distribution/probe"]["latest"]["evidence"].split()[1])
        for r in (report, again)
    ]
    assert draws[1] > draws[0], "the second doctor had samplers draw again"
