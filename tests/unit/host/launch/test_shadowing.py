"""A file in the working directory that is named like a module is imported by no service and no command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leeway_host.launch.commands import SERVICE_ENV

pytestmark = pytest.mark.thorough

HIDING = ("types.py", "redis/__init__.py", "pydantic.py", "typer.py", "yaml.py", "numpy.py")


SERVICE = ["--config", "missing.yaml", "--run", "r", "--redis", "redis://h:1/0"]
COMMANDS = {
    "leeway_controller": SERVICE,
    "leeway_trainer": [*SERVICE, "--out", "out"],
    "leeway_sampler": [*SERVICE, "--id", "s"],
    "leeway_host": ["config", "show", "missing.yaml"],
}


@pytest.mark.parametrize("module", COMMANDS)
def test_nothing_is_imported_from_the_working_directory(tmp_path: Path, module: str) -> None:
    for name in HIDING:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('imported from here')\n")
    argv = [sys.executable, "-m", module, *COMMANDS[module]]

    def start(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)

    done = start({**os.environ, **SERVICE_ENV})
    assert done.returncode == 2 and "missing.yaml" in done.stderr, done.stderr
    bare = start({name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"})
    # Services rely on the variable, the command protects itself.
    assert ("imported from here" in bare.stderr) == (module != "leeway_host")
