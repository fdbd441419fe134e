"""`leeway run` as a user starts it, in a separate process, with everything that it starts marked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
MARK = "E2E_MARK"
SMALL = {
    "name": "e2e",
    "model": {
        "name": "tiny",
        "max_length": 32,
        "params": {"hidden": 64, "layers": 2, "warmup_steps": 30, "target_accuracy": 0.9},
    },
    "task": {"kind": "digits", "size": 64, "reward": "verifier"},
    "sampling": {"max_new_tokens": 8, "head_tokens": 16},
    "batch": {"prompts": 4, "group_size": 4},
    "sync": {"clip_fraction": None, "max_age": 2, "ticket_idle_s": 3.0},
    "trainer": {"steps": 4, "learning_rate": 1e-4, "checkpoint_every": 2},
}
"""A run that takes seconds once the engines are up."""


class Run:
    """One `leeway run`, without the preflight, which has its own tests. `out` is its output directory."""

    def __init__(self, cache: Path, out: Path, config: Path, *args: str, cwd: Path = ROOT) -> None:
        self.out, self.mark = out, uuid.uuid4().hex
        environ = {k: v for k, v in os.environ.items() if not k.startswith("LEEWAY_")}
        environ |= {MARK: self.mark, "LEEWAY_CACHE_DIR": str(cache)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "leeway_host", "run", str(config), "--no-preflight", *args],
            env=environ,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, budget_s: float = 380.0) -> tuple[int, str]:
        """(exit code, everything it printed)."""
        output, _ = self.process.communicate(timeout=budget_s)
        return self.process.returncode, output

    def processes(self) -> list[psutil.Process]:
        """Everything that this run started and that still runs (zombies do not)."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess):
                continue
        return found

    def service(self, module: str, name: str = "") -> psutil.Process:
        """The process of a service (`leeway_sampler`, id `sampler-0`)."""

        def matches(command: list[str]) -> bool:
            # A service is `python -m module ...`; children that it spawned have other arguments.
            return command[1:3] == ["-m", module] and (not name or name in command)

        found = [p for p in self.processes() if matches(p.cmdline())]
        assert len(found) == 1, (module, name, found)
        return found[0]

    def rows(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl so far."""
        path = self.out / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return summary

    def wait_for(self, condition: Callable[[], object], budget_s: float = 150.0) -> None:
        """Until `condition()` holds; fails when the run ends first or takes longer."""
        deadline = time.monotonic() + budget_s
        while not condition():
            assert self.process.poll() is None, self.finish()
            assert time.monotonic() < deadline, "nothing happened within the budget"
            time.sleep(0.05)

    def assert_nothing_left(self, budget_s: float = 10.0) -> None:
        """No process of the run is left."""
        deadline = time.monotonic() + budget_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, [(p.pid, p.cmdline()) for p in left]

    def kill_everything(self) -> None:
        for process in self.processes():
            process.send_signal(signal.SIGKILL)


StartRun = Callable[..., Run]
