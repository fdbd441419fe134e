"""`leeway chaos`: whatever happens to the processes, the same batches are trained in the same order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from e2e_support import ROOT, SMALL, StartRun


def chaos(cache: Path, tmp_path: Path, faults: int, seed: int, budget_s: float) -> str:
    """Run it, and return what it printed."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    out = tmp_path / "chaos"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LEEWAY_")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "leeway_host", "chaos", str(config), "--out", str(out)),
            *("--kills", str(faults), "--seed", str(seed)),
        ],
        env=environ | {"LEEWAY_CACHE_DIR": str(cache)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=budget_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    record = json.loads((out / "chaos.json").read_text())
    assert len(record["faults"]) == faults
    assert record["problems"] == []
    assert f"holds after {faults} faults" in done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nine_faults_change_nothing(cache: Path, tmp_path: Path) -> None:
    # This seed's faults kill the controller, the trainer and a sampler, cut the first two off, and pause the
    # controller for longer than the trainer waits for it, and a sampler for longer than its claims last.
    chaos(cache, tmp_path, 9, seed=25529, budget_s=890)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_faults_change_nothing(cache: Path, tmp_path: Path) -> None:
    chaos(cache, tmp_path, 200, seed=3, budget_s=7190)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_that_dies_with_everything_in_flight(start_run: StartRun) -> None:
    calm = start_run("--steps", "8", seed=5)
    assert calm.finish()[0] == 0
    run = start_run("--steps", "8", seed=5)
    run.wait_for(lambda: len(run.rows()) >= 3)
    children = psutil.Process(run.process.pid).children()  # a server overwrites its environment, and our mark
    (server,) = [child for child in children if "valkey" in child.name() or "redis" in child.name()]
    server.send_signal(signal.SIGKILL)
    code, output = run.finish()
    assert code == 0, output
    assert "the Redis server ended (killed by SIGKILL) and was restarted" in output
    assert "what was in flight of epoch 1 was lost" in output
    assert [row["step"] for row in run.rows()] == list(range(8))
    assert [row["batch/digest"] for row in run.rows()] == [row["batch/digest"] for row in calm.rows()]
    run.assert_nothing_left()
