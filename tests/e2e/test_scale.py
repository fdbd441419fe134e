"""`leeway scale` and `leeway status` while a run on this machine is active."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from e2e_support import ROOT, Run, StartRun

pytestmark = [pytest.mark.timeout(900)]


def leeway(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "leeway_host", *args], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(run: Run) -> dict:  # type: ignore[type-arg]
    return json.loads(leeway("status", str(run.out), "--json"))["run"]


@pytest.mark.slow
def test_one_to_two_to_one(start_run: StartRun) -> None:
    run = start_run("--steps", "2000")
    run.wait_for(lambda: len(run.rows()) >= 1, 300)
    assert "requested 2 samplers" in leeway("scale", "samplers", "2", str(run.out))
    run.wait_for(lambda: len([s for s in status(run)["samplers"] if s["tickets"]]) == 2, 300)
    leeway("scale", "samplers", "1", str(run.out))
    run.wait_for(lambda: [s["sampler"] for s in status(run)["samplers"]] == ["sampler-0"], 120)
    at = len(run.rows())
    run.wait_for(lambda: len(run.rows()) >= at + 3, 120)
    assert [row["step"] for row in run.rows()] == list(range(len(run.rows())))
    run.process.terminate()
    code, output = run.finish()
    assert code == 130, output
    assert "scaled to 2 samplers" in output and "scaled to 1 samplers" in output
    assert not (run.out / ".address").exists()
    run.assert_nothing_left()
