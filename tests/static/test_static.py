"""ruff and mypy find nothing, checked beside the other tests. `make lint` runs the same commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = {"mypy": ["mypy"], "ruff": ["ruff", "check", "."], "format": ["ruff", "format", "--check", "."]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", COMMANDS)
def test_nothing_is_found(tool: str) -> None:
    command = [sys.executable, "-m", *COMMANDS[tool]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
