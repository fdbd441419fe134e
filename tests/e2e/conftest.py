"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path, see --import-mode

from e2e_support import ROOT, SMALL, Run, StartRun


@pytest.fixture(scope="session")
def cache(shared_tmp: Path) -> Path:
    """A model cache of this session, so that tests do not depend on what this machine has built before."""
    return shared_tmp / "cache"


@pytest.fixture
def start_run(cache: Path, tmp_path: Path) -> Iterator[StartRun]:
    """Starts runs of SMALL with sections changed: start_run("--steps", "3", out=..., sync={...})."""
    runs: list[Run] = []

    def start(*args: str, out: Path | None = None, cwd: Path = ROOT, **sections: Any) -> Run:
        config = {
            # Another kind of task has other keys.
            k: {**({} if "kind" in sections.get(k, {}) else v), **sections.pop(k, {})}
            if isinstance(v, dict)
            else v
            for k, v in SMALL.items()
        }
        path = tmp_path / f"config-{len(runs)}.json"  # JSON is YAML
        path.write_text(json.dumps({**config, **sections}))
        where = out or tmp_path / f"run-{len(runs)}"
        if "--resume" not in args:
            args = ("--out", str(where), *args)
        run = Run(cache, where, path, *args, cwd=cwd)
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.kill_everything()
        run.process.wait(10)
