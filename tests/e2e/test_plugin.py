"""An installed package adds a correction, a policy, a task and a reward, and a run uses all four."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from e2e_support import ROOT, Run

PLUGIN = ROOT / "tests" / "plugin"
USE_ALL = (
    *("--set", "correction={method: theirs, cap: 3.0}"),
    *("--set", "sync.policies={low_reward: {below: 2.0}}"),  # rewards are at most 1: after every step
    *("--set", "task={kind: reverse, length: 4, reward: prefix}"),
)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from here find the package as if pip had installed it."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project["entry-points"].items()
    text = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups]
    (info / "entry_points.txt").write_text("\n".join(text))
    path = [str(PLUGIN / "src"), str(info.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


def leeway(*args: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "leeway_host", *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.usefixtures("installed")
def test_names_and_keys_are_known() -> None:
    code, shown = leeway("config", "show", "examples/tiny.yaml", *USE_ALL)
    assert code == 0, shown
    assert all(line in shown for line in ("kind: reverse", "reward: prefix", "method: theirs", "cap: 3.0"))
    code, shown = leeway("corrections", "show", "theirs")
    assert code == 0 and "A r/(1 + r/cap) s(a)" in shown
    code, shown = leeway("config", "show", "examples/tiny.yaml", "--set", "task={kind: reverse, lenght: 3}")
    assert code == 2 and "kind reverse allows: length, size" in shown and "did you mean 'length'" in shown


def test_without_the_package_they_are_unknown() -> None:
    code, shown = leeway("config", "show", "examples/tiny.yaml", *USE_ALL)
    assert code == 2
    assert "unknown task kind 'reverse'; available: digits, jsonl, reasoning_gym" in shown
    assert "unknown correction 'theirs'" in shown
    assert "unknown policy 'low_reward'" in shown


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_run_uses_all_four(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = "model.params={hidden: 64, layers: 2, warmup_steps: 30}"
    run = Run(
        cache, out, ROOT / "examples/tiny.yaml", *USE_ALL, "--steps", "3", "--set", small, "--out", str(out)
    )
    try:
        code, output = run.finish(300)
        assert code == 0, output
        summary, rows = run.summary(), run.rows()
        assert (summary["steps"], summary["method"]) == (3, "theirs")
        assert [(r["step"], r["reason"]) for r in summary["resyncs"]] == [
            (0, "low_reward"),
            (1, "low_reward"),
        ]
        assert all(0 < row["reward/mean"] < 1 and row["reward/errors"] == 0 for row in rows), rows
        assert all(0 < row["weight/mean"] < 3 for row in rows)  # below the bound
    finally:
        run.kill_everything()
        run.process.wait(10)
