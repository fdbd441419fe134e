"""A service as a child process, with its own process group and log, stopped together with its children."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from leeway.process import die_with_parent

LOG_BYTES = 65536


def without_addresses(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the variables that may hold a server's URL or password."""
    return {name: value for name, value in environ.items() if not name.startswith("LEEWAY_REDIS_")}


class Service:
    """A child process that can be restarted. It must be started from the main thread (see `start`).

    stopped -> start -> running -> (exits | terminate | kill) -> stopped

    `secret` is written to the process's standard input, as one line.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log_path: Path,
        env: Mapping[str, str],
        max_restarts: int = 0,
        secret: str = "",
    ) -> None:
        self.name, self.argv, self.log_path, self.env = name, list(argv), log_path, dict(env)
        self._secret = secret
        self.max_restarts = max_restarts
        self.restarts = 0
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. The kernel sends it SIGKILL when the thread that called this ends."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**without_addresses(os.environ), **self.env},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:  # it may have ended already
            pipe.write(f"{self._secret}\n".encode())

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def poll(self) -> int | None:
        """Exit status; None while it is running, or if it was never started."""
        return self._process.poll() if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal_group(self, number: int) -> None:
        """Signal everything in the process group, including children that outlived the service."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # the group is empty

    def kill_workers(self) -> None:
        """SIGKILL to everything in the group except multiprocessing's resource trackers.

        Those exit once the others are gone, and remove the shared memory that was left behind.
        """
        for process in psutil.process_iter():
            try:
                ours = self._process is not None and os.getpgid(process.pid) == self._process.pid
                if ours and not any("resource_tracker" in word for word in process.cmdline()):
                    process.kill()
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue  # it has ended in the meantime

    def group_alive(self) -> bool:
        """True while any process of the group is running."""
        if self._process is None:
            return False
        self._process.poll()  # reap it: a zombie keeps the group alive
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def terminate(self) -> None:
        """SIGTERM to the service only, which stops its own children."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def restart(self) -> bool:
        """Restart after an exit; False when `max_restarts` is reached."""
        if self.restarts >= self.max_restarts:
            return False
        kill_all([self])
        self.restarts += 1
        self.start()
        return True

    def read_log(self, *, all_starts: bool = False) -> str:
        """The end of the log, at most 64 KiB: of the last start, or of all starts."""
        try:
            with self.log_path.open("rb") as log:
                begin = 0 if all_starts else self._log_start
                log.seek(max(begin, self.log_path.stat().st_size - LOG_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of the log, as they are."""
        return "\n".join(self.read_log(all_starts=True).splitlines()[-lines:]) or "(no log)"


def stop_all(services: Iterable[Service], grace_s: float) -> None:
    """SIGTERM, then after `grace_s` seconds SIGKILL to whole groups; returns when nothing is left."""
    services = list(services)
    for service in services:
        service.terminate()
    _wait(services, lambda service: service.running, grace_s)
    kill_all(services)


def kill_all(services: list[Service]) -> None:
    """SIGKILL to everything in the groups, after at most 2 s in which shared memory is removed."""
    for service in services:
        service.kill_workers()
    _wait(services, Service.group_alive, 2.0)
    for service in services:
        service.signal_group(signal.SIGKILL)
    _wait(services, Service.group_alive, 5.0)


def _wait(services: list[Service], alive: Callable[[Service], bool], budget_s: float) -> None:
    deadline = time.monotonic() + budget_s
    while any(alive(service) for service in services) and time.monotonic() < deadline:
        time.sleep(0.05)
