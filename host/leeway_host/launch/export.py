"""Models from checkpoints: the trainer's code in a process, because this package imports no service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from leeway.errors import EXIT_USAGE, LeewayError, UsageError

PREFIX = "leeway: "


def export_run(run: Path, step: int | None = None, out: Path | None = None) -> Path:
    """Write a Hugging Face directory from a checkpoint of `run`; returns it.

    Without GPU or Redis, also for a run that broke. Raises UsageError if there is no such checkpoint, or if
    it is damaged, and LeewayError for everything else.
    """
    command = [sys.executable, "-m", "leeway_trainer.export", str(run)]
    command += ["--step", str(step)] if step is not None else []
    command += ["--out", str(out)] if out is not None else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Path(done.stdout.strip().splitlines()[-1])
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    reason = next((line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)), lines[-1])
    raise (UsageError if done.returncode == EXIT_USAGE else LeewayError)(f"no model was written: {reason}")
