"""`leeway run --detach`: the launcher as a process of its own session, which outlives the terminal.

start -> (the directory is locked by it -> return) | (it ended before -> its output is the error)
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from leeway.errors import LeewayError, UsageError
from leeway_host.launch.lookup import launcher_of

LOG = "run.log"
"""What the launcher prints, in the run's directory."""
START_S = 30.0
"""Maximum time until the launcher has locked its directory."""


class DetachError(LeewayError):
    """The launcher ended at once; the message is what it printed."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def detached_argv(argv: Sequence[str], out: Path, *, resume: bool) -> list[str]:
    """The command of the launcher from the arguments of `leeway run ... --detach`."""
    kept = [word for word in argv if word != "--detach"]
    named = any(word == "--out" or word.startswith("--out=") for word in kept)
    # -P: the working directory is not searched for modules.
    command = [sys.executable, "-P", "-m", "leeway_host", *kept]
    return command if named or resume else [*command, "--out", str(out)]


def start_detached(argv: Sequence[str], out: Path, *, environ: Mapping[str, str] | None = None) -> int:
    """Start the launcher `argv` with its output in `out`; returns its process id once it owns `out`.

    Raises UsageError when `out` is in use or cannot be written, DetachError when the launcher ends early.
    """
    active = launcher_of(out)
    if active is not None:
        raise UsageError(f"{out} is in use by the run of process {active}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        log = (out / LOG).open("ab")
    except OSError as error:
        raise UsageError(f"the output directory {out} cannot be used: {error.strerror}") from error
    with log:
        began_at = log.tell()
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(os.environ if environ is None else environ),
        )
    deadline = time.monotonic() + START_S
    while launcher_of(out) != process.pid:
        code = process.poll()
        if code is not None:
            text = (out / LOG).read_bytes()[began_at:].decode(errors="replace").strip()
            raise DetachError(text.removeprefix("leeway: ") or f"the launcher ended ({code})", code or 1)
        if time.monotonic() > deadline:
            break  # a slow disk: it is running, and its log will say more
        time.sleep(0.05)
    process.returncode = 0  # it is not ours to wait for
    return process.pid


def how_to_follow(out: Path, pid: int) -> str:
    """What the user is told: where the run is, how to follow it, how to end it."""
    return (
        f"{out}: started (process {pid})\n"
        f"  follow: leeway status {out} --watch, or tail -f {out / LOG}\n"
        f"  stop:   kill {pid}"
    )
