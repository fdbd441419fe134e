"""Finds a run of this machine again: is a launcher active in DIR, and if not, how did its run end?"""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leeway.errors import UsageError
from leeway_host.launch.address import FILE as ADDRESS_FILE
from leeway_host.launch.address import RunAddress, find_address
from leeway_host.launch.claims import CONFIG_FILE, LOCK_FILE
from leeway_host.launch.record import SUMMARY_FILE

Summary = dict[str, Any]


@dataclass(frozen=True)
class LocalState:
    """The run in the directory `out`.

    `pid`: its launcher, None when none is active. `address`: how to reach its Redis, None before that has
    started. `summary`: how the last run in `out` ended; None while one is active, and when it left none.
    """

    out: Path
    pid: int | None
    address: RunAddress | None
    summary: Summary | None

    @property
    def exit_code(self) -> int:
        """0 for a run that is active or has completed, else 1."""
        done = self.summary is not None and self.summary.get("status") == "completed"
        return 0 if self.pid is not None or done else 1

    def describe(self) -> list[str]:
        """The state as lines of text, without what only Redis knows."""
        if self.pid is not None:
            return [f"{self.out}: active (process {self.pid}), preparing"]
        if self.summary is None:
            return [
                f"{self.out}: ended without a summary: its launcher was killed, or the machine was restarted",
                f"  next: leeway run --resume {self.out}",
            ]
        lines = [f"run {self.summary.get('run_id')}: {self.summary.get('status')}"]
        lines[0] += f", {self.summary.get('steps', 0)} steps done"
        reason = self.summary.get("reason")
        if isinstance(reason, dict):
            lines.append(f"  {reason.get('process')}: {reason.get('cause')}")
            lines.append(f"  next: {reason.get('next')}")
        return lines

    def as_json(self) -> str:
        """The state as one JSON object."""
        shown = {"out": str(self.out), "pid": self.pid, "run": None, "pods": None, "summary": self.summary}
        return json.dumps(shown)


def look_up(out: Path) -> LocalState:
    """Raises UsageError when no run was ever started in `out`."""
    pid = launcher_of(out)
    if pid is not None:
        return LocalState(out, pid, _address(out), None)
    summary = _summary(out)
    if (out / ADDRESS_FILE).exists():
        summary = None  # left by a launcher that was killed; the summary is of a run before
    elif summary is None and not (out / CONFIG_FILE).exists():
        raise UsageError(f"{out}: no run is or was active there ({out / SUMMARY_FILE} is missing)")
    return LocalState(out, None, None, summary)


def launcher_of(out: Path) -> int | None:
    """Process id of the launcher that has locked the directory; None when there is none."""
    try:
        lock = (out / LOCK_FILE).open("r", encoding="utf-8")
    except OSError:
        return None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = lock.read().strip()
            return int(text) if text.isdigit() else 0
    return None


def _address(out: Path) -> RunAddress | None:
    try:
        return find_address(out)
    except UsageError:
        return None


def _summary(out: Path) -> Summary | None:
    try:
        found = json.loads((out / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
