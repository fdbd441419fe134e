"""A reward worker and everything below it, as the pool sees them.

    start -> loading -> ready <-> scoring
      any state -> ended    hang_up (a timeout, the end of the pool), or the worker dies by itself

Hanging up ends the whole tree, whatever reward functions have started (leeway.rewards.keeper).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import psutil

from leeway.config.task import TaskConfig
from leeway.rewards.environment import reward_environment
from leeway.rewards.worker import SIGNALLED, dump_settings

START_BUDGET_S = 60.0
"""Time for a worker to start: modules are imported and the task is loaded."""
ACCEPT_BUDGET_S = 10.0
"""Time for a ready worker to begin with a response."""
END_BUDGET_S = 5.0
"""Time for a keeper to kill everything below it, before it is killed itself."""
MAX_LINE_BYTES = 1 << 20


class ScoringError(Exception):
    """A response could not be scored, and why."""


class TaskUnusable(ScoringError):
    """The worker cannot load the task or the reward; the message is that of TaskError."""


class WorkerDied(Exception):
    """The worker died before it began with the response, which says nothing about the response."""


class WorkerProcess:
    """One worker, started in the background when this is created. `quiet`: discard what it prints."""

    def __init__(self, config: TaskConfig, *, quiet: bool = False) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                # -P: the working directory must not hide installed packages.
                [sys.executable, "-P", "-m", "leeway.rewards.keeper", str(fd)],
                env=reward_environment(os.environ, config.reward_env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if quiet else None,
                stderr=subprocess.DEVNULL if quiet else None,
                pass_fds=[fd],
                start_new_session=True,
            )
        self._first_line = dump_settings(config)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._problem: str | None = None
        self.isolation = ""
        """How the worker is kept apart from other processes, once it is ready."""
        self._hung_up = False

    async def score(self, index: int, response: str, timeout_s: float) -> float:
        """The reward of `response` to item `index`.

        Raises ScoringError if there is none, and WorkerDied if the worker was dead before. After a
        ScoringError that is not the function's own exception, the worker has to be replaced: see `usable`.
        """
        reader, writer = await self._connect()
        if self._problem is not None:
            raise TaskUnusable(self._problem)
        try:
            writer.write(json.dumps({"index": index, "response": response}).encode() + b"\n")
            await self._read(reader, ACCEPT_BUDGET_S)
        except (OSError, TimeoutError) as error:
            self.hang_up()
            raise WorkerDied from error
        try:
            answer = await self._read(reader, timeout_s)
        except TimeoutError:
            await self.end()
            raise ScoringError(
                f"scoring did not end within {timeout_s:g} s and was killed, with all that it had started"
            ) from None
        except WorkerDied:
            code = await self.end()
            raise ScoringError(f"the reward worker died while scoring ({_describe_exit(code)})") from None
        except asyncio.CancelledError:
            self.hang_up()
            raise
        if "error" in answer:
            raise ScoringError(answer["error"])
        return float(answer["value"])

    @property
    def usable(self) -> bool:
        """False once the worker has ended or was hung up."""
        return not self._hung_up and self._process.poll() is None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send the settings and wait until the worker is ready, once."""
        if self._streams is None:
            reader, writer = await asyncio.open_connection(sock=self._socket, limit=MAX_LINE_BYTES)
            self._streams = reader, writer
            try:
                writer.write(self._first_line)
                ready = await self._read(reader, START_BUDGET_S)
                self._problem, self.isolation = ready["problem"], ready["isolation"]
            except TimeoutError:
                await self.end()
                raise ScoringError(
                    f"the reward worker did not start within {START_BUDGET_S:.0f} s: is the task or the "
                    "module's import slow?"
                ) from None
            except OSError as error:
                self.hang_up()
                raise WorkerDied from error
            except asyncio.CancelledError:
                self.hang_up()
                raise
        return self._streams

    async def _read(self, reader: asyncio.StreamReader, budget_s: float) -> dict[str, Any]:
        """The next message. Raises TimeoutError, OSError, or WorkerDied if there is none."""
        line = await asyncio.wait_for(reader.readline(), budget_s)
        if not line.endswith(b"\n"):
            raise WorkerDied
        message: dict[str, Any] = json.loads(line)
        return message

    def hang_up(self) -> None:
        """Have the keeper end the worker and everything below it. Does not wait."""
        self._hung_up = True
        if self._streams is not None:
            self._streams[1].transport.abort()
        else:
            self._socket.close()

    async def end(self) -> int:
        """`hang_up`, and wait until nothing is left; the exit status."""
        self.hang_up()
        try:
            return await asyncio.to_thread(self._process.wait, END_BUDGET_S)
        except subprocess.TimeoutExpired:
            return await asyncio.to_thread(self._kill)

    def _kill(self) -> int:
        """SIGKILL to a keeper that does not end (stopped by reward code, say) and to all below it."""
        try:
            below = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            below = []
        self._process.kill()
        for process in below:
            try:
                process.kill()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return self._process.wait(END_BUDGET_S)


def _describe_exit(code: int) -> str:
    if code <= SIGNALLED:
        return f"exit code {code}"
    try:
        return signal.Signals(code - SIGNALLED).name
    except ValueError:
        return f"exit code {code}"
