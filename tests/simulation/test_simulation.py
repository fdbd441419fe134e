"""`leeway chaos --simulate`: it holds, it replays exactly, and it finds bugs that are planted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leeway_simulation.faults import KINDS, plan_faults

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHEAP = ("ignore_the_epoch",)
"""Planted bugs that are found within a dozen histories."""
OTHERS = (
    "acknowledge_before_the_effect",
    "drop_the_watch_of_the_trainer",
    "drop_the_watch_of_the_controller",
    "take_the_last_manifest",
    "forget_lost_replies",
)


def run(*command: str, budget_s: float) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(
        [sys.executable, *command],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=budget_s,
        check=False,
    )


def simulate(seed: int, seeds: int, budget_s: float) -> dict[str, Any]:
    """The result of a range of seeds; fails with what broke."""
    done = run(
        *("-m", "leeway_simulation", "--seed", str(seed), "--seeds", str(seeds), "--json"), budget_s=budget_s
    )
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    print(json.dumps(found))
    assert found["violations"] == [], f"again: leeway chaos --simulate --seed {seed} --seeds {seeds}"
    assert found["histories"] == seeds
    return found


@pytest.mark.parametrize("first", [0, 40])
@pytest.mark.timeout(600)
def test_histories_under_faults_hold(first: int) -> None:
    found = simulate(first, 40, budget_s=600)
    assert set(found["faults"]) == set(KINDS), "some kind of fault never happened"


@pytest.mark.slow
@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("first", range(0, 20_000, 2000))
def test_many_histories_under_faults_hold(first: int) -> None:
    simulate(first, 2000, budget_s=20_000)


def test_a_seed_replays_exactly() -> None:
    command = ("-m", "leeway_simulation", "--seed", "3", "--seeds", "2", "--trace")
    first, second = (run(*command, budget_s=200) for _ in range(2))
    cost = "histories, "
    assert first.returncode == second.returncode == 0, first.stderr
    lines, again = (
        [line for line in done.stdout.splitlines() if cost not in line] for done in (first, second)
    )
    assert lines == again
    assert sum("fault:" in line for line in lines) >= 3


def find(bug: str, seeds: int) -> None:
    done = run(str(HERE / "planted.py"), bug, str(seeds), budget_s=3000)
    assert done.returncode == 0, done.stderr
    assert done.stdout, f"none of {seeds} histories shows the bug {bug}"
    found = json.loads(done.stdout)
    print(bug, found)
    simulate(found["seed"], 1, budget_s=200)  # it was the bug


@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", CHEAP)
def test_a_planted_bug_is_found(bug: str) -> None:
    find(bug, 500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bug", OTHERS)
def test_each_planted_bug_is_found(bug: str) -> None:
    find(bug, 500)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_broken_history_is_shown_with_the_faults_that_it_takes() -> None:
    done = run(str(HERE / "planted.py"), "ignore_the_epoch", "show", budget_s=600)
    assert done.returncode == 1, done.stderr
    seeds = [int(seed) for seed in re.findall(r"BROKEN: seed (\d+)", done.stdout)]
    assert seeds
    assert "again: leeway chaos --simulate --seed" in done.stdout
    faults = [line for line in done.stdout.splitlines() if line.startswith("  call ")]
    assert len(seeds) <= len(faults) < sum(len(plan_faults(seed)) for seed in seeds)
