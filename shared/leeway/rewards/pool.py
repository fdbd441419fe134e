"""Scoring in subprocesses that can be killed.

A reward function is third-party code: it may hang, crash, raise or return nonsense. Whatever it does, a
rollout ends with a reward (`task.error_reward` and a reason), because dropping the rollout would make the
batch depend on the outcome. Threads cannot be killed, so scoring runs in processes, with limits on time and
memory.
"""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import os
import resource
import signal
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import psutil

from leeway.config.task import TaskConfig
from leeway.process import die_with_parent
from leeway.rewards.load import Scorer, load_reward
from leeway.tasks.base import Task, TaskError
from leeway.tasks.load import load_task, task_config

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Attempts to score a response whose worker died for a reason that has nothing to do with it."""

START_BUDGET_S = 60.0
"""Time for a worker to start: modules are imported and the task is loaded."""


@dataclass(frozen=True)
class RewardResult:
    """The reward of one response; `error` says why it is `task.error_reward`, None if it was scored."""

    value: float
    error: str | None = None


class ScoringError(Exception):
    """A response could not be scored, and why."""


class RewardPool:
    """Scores responses of a task in `workers` subprocesses, each scoring within `timeout_s`.

    Workers start in the background and are replaced when they are killed or die. They end with the pool, and
    with the process that owns it, even if that is killed with SIGKILL.
    """

    def __init__(
        self, config: TaskConfig, workers: int | None = None, timeout_s: float | None = None
    ) -> None:
        self._config = config
        self._workers = config.reward_workers if workers is None else workers
        self._timeout_s = config.reward_timeout_s if timeout_s is None else timeout_s
        self._error_reward = config.error_reward
        self._scoring: set[Future[float]] = set()
        self._closed = False
        self._pool = self._open_pool()

    async def score(self, index: int, response: str) -> RewardResult:
        """The reward of `response` to item `index`. Never raises because of what the reward function does."""
        for _ in range(MAX_ATTEMPTS):
            try:
                value = await self._score_once(index, response)
            except BrokenProcessPool:  # says nothing about this response: score it again
                continue
            except ScoringError as error:
                return self._failed(str(error))
            return RewardResult(value)
        return self._failed(f"the reward workers died {MAX_ATTEMPTS} times before they scored this response")

    async def _score_once(self, index: int, response: str) -> float:
        """The reward; ScoringError if there is none, BrokenProcessPool if the pool has stopped in between."""
        if self._closed:
            raise ScoringError("the reward pool is closed")
        future = self._schedule(index, response)
        self._scoring.add(future)
        budget_s = START_BUDGET_S + self._timeout_s * (1 + len(self._scoring) / self._workers)
        try:
            waiting = asyncio.wrap_future(future)
            await asyncio.wait({waiting}, timeout=budget_s)
        finally:
            self._scoring.discard(future)
            future.cancel()  # no effect when it is done; otherwise this kills its worker
        if waiting.cancelled():
            raise ScoringError("the reward pool was closed while scoring")
        if not waiting.done():
            raise ScoringError(f"no reward worker answered within {budget_s:.0f} s")
        error = waiting.exception()
        if isinstance(error, BrokenProcessPool):
            raise error
        if error is not None:
            raise ScoringError(_describe(error, self._timeout_s))
        value = waiting.result()
        if not math.isfinite(value):
            raise ScoringError(f"the reward function returned {value}")
        return value

    def close(self, budget_s: float = 5.0) -> None:
        """Kill the workers, waiting at most `budget_s`. Responses still being scored are cancelled."""
        self._closed = True
        for future in list(self._scoring):
            future.cancel()
        self._pool.stop()
        try:
            self._pool.join(timeout=budget_s)
        except TimeoutError:
            log.warning("reward workers did not end within %.1f s", budget_s)

    async def aclose(self, budget_s: float = 5.0) -> None:
        """`close` without blocking the event loop."""
        await asyncio.to_thread(self.close, budget_s)

    async def __aenter__(self) -> RewardPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _schedule(self, index: int, response: str) -> Future[float]:
        if not self._pool.active:
            self._replace_pool()
        try:
            future: Future[float] = self._pool.schedule(
                _score, args=(index, response), timeout=self._timeout_s
            )
            return future
        except RuntimeError as error:  # it stopped since `active` was read
            raise BrokenProcessPool(str(error)) from error

    def _open_pool(self) -> Any:
        from pebble import ProcessPool

        pool = ProcessPool(
            max_workers=self._workers,
            initializer=_start_worker,
            initargs=(self._config.model_dump(), os.getpid()),
            context=multiprocessing.get_context("spawn"),
        )
        pool.schedule(_ping)
        return pool

    def _replace_pool(self) -> None:
        """pebble stops a pool when a worker dies that was not scoring (one that was killed while idle)."""
        log.warning("reward workers died; starting new ones")
        self._pool.stop()
        self._pool = self._open_pool()

    def _failed(self, reason: str) -> RewardResult:
        log.warning("reward: %s; using task.error_reward=%g", reason, self._error_reward)
        return RewardResult(self._error_reward, reason)


def _describe(error: BaseException, timeout_s: float) -> str:
    from pebble import ProcessExpired

    if isinstance(error, TimeoutError):
        return f"scoring did not end within {timeout_s:g} s and was killed"
    if isinstance(error, ProcessExpired):
        return f"the reward worker died while scoring (exit code {error.exitcode})"
    return f"the reward function raised {type(error).__name__}: {error}"[:500]


# Everything below runs in a worker.


@dataclass
class _Worker:
    task: Task | None = None
    score: Scorer | None = None
    problem: str = "the worker was not started"


_worker = _Worker()


def _start_worker(config: dict[str, Any], owner_pid: int) -> None:
    die_with_parent(owner_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    settings = task_config(**config)
    try:
        _worker.task = load_task(settings)
        _worker.score = load_reward(settings, _worker.task)
    except TaskError as error:
        # Reported with every response: a worker that fails to start would be restarted forever.
        _worker.problem = str(error)
    if settings.reward_memory_mib is not None:
        _limit_memory(settings.reward_memory_mib)


def _limit_memory(mib: int) -> None:
    """Limit the address space to its current size plus `mib`: allocations beyond it raise MemoryError."""
    limit = psutil.Process().memory_info().vms + (mib << 20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _score(index: int, response: str) -> float:
    if _worker.task is None or _worker.score is None:
        raise TaskError(_worker.problem)
    try:
        return float(_worker.score(_worker.task.item(index), response))
    except MemoryError:
        pass  # a new one is raised below: this one keeps alive what the function had allocated
    raise MemoryError("it used more memory than task.reward_memory_mib allows")


def _ping() -> None:
    """Does nothing; scheduling it makes the pool start its workers."""
