"""Scoring in subprocesses that can be killed.

A reward function is third-party code: it may hang, crash, raise or return nonsense. Whatever it does, a
rollout ends with a reward (`task.error_reward` and a reason), because dropping the rollout would make the
batch depend on the outcome. Threads cannot be killed, so scoring runs in processes, with limits on time and
memory.

    score    waits for: a free worker      unblocked by: a worker that has scored | its replacement | aclose
             waits for: the worker         unblocked by: its answer | timeout_s, then its tree is killed
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from leeway.config.task import TaskConfig
from leeway.rewards.worker_process import START_BUDGET_S, ScoringError, WorkerDied, WorkerProcess

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Attempts to score a response whose worker died for a reason that has nothing to do with it."""


@dataclass(frozen=True)
class RewardResult:
    """The reward of one response; `error` says why it is `task.error_reward`, None if it was scored."""

    value: float
    error: str | None = None


class RewardPool:
    """Scores responses of a task in `workers` subprocesses, each scoring within `timeout_s`.

    Workers start in the background and are replaced when they are killed or die. They and all processes that
    reward functions have started end with the pool, and with the process that owns it, even if that is killed
    with SIGKILL.
    """

    def __init__(
        self, config: TaskConfig, workers: int | None = None, timeout_s: float | None = None
    ) -> None:
        self._config = config
        self._size = config.reward_workers if workers is None else workers
        self._timeout_s = config.reward_timeout_s if timeout_s is None else timeout_s
        self._error_reward = config.error_reward
        self._closed = self._described = False
        self._scoring = 0
        self._workers: set[WorkerProcess] = set()
        self._ending: set[asyncio.Task[int]] = set()
        self._free: asyncio.Queue[WorkerProcess | None] = asyncio.Queue()
        """Workers that are not scoring; None wakes those who wait for one when the pool is closed."""
        for _ in range(self._size):
            self._add_worker()

    async def score(self, index: int, response: str) -> RewardResult:
        """The reward of `response` to item `index`. Never raises because of what the reward function does."""
        self._scoring += 1
        try:
            for _ in range(MAX_ATTEMPTS):
                try:
                    return RewardResult(await self._score_once(index, response))
                except WorkerDied:  # says nothing about this response: score it again
                    continue
                except ScoringError as error:
                    return self._failed(str(error))
        finally:
            self._scoring -= 1
        return self._failed(f"the reward workers died {MAX_ATTEMPTS} times before they scored this response")

    async def _score_once(self, index: int, response: str) -> float:
        """The reward; ScoringError if there is none, WorkerDied if the worker died before it began."""
        worker = await self._take_worker()
        try:
            value = await worker.score(index, response, self._timeout_s)
            if not self._described:
                self._described = True
                log.info("%s", worker.isolation)
            return value
        except (ScoringError, WorkerDied) as error:
            if self._closed:
                raise ScoringError("the reward pool was closed while scoring") from error
            raise
        finally:
            self._give_back(worker)

    async def _take_worker(self) -> WorkerProcess:
        """A free worker. Raises ScoringError if there is none in time, or if the pool is closed."""
        if self._closed:
            raise ScoringError("the reward pool is closed")
        budget_s = START_BUDGET_S + self._timeout_s * (1 + self._scoring / self._size)
        try:
            worker = await asyncio.wait_for(self._free.get(), budget_s)
        except TimeoutError:
            raise ScoringError(f"no reward worker was free within {budget_s:.0f} s") from None
        if worker is None:
            self._free.put_nowait(None)  # for the next one who waits
            raise ScoringError("the reward pool was closed while scoring")
        return worker

    def _give_back(self, worker: WorkerProcess) -> None:
        """Make a worker available again, or another one in its place."""
        if self._closed:
            return
        if worker.usable:
            self._free.put_nowait(worker)
        else:
            self._workers.discard(worker)
            ending = asyncio.create_task(worker.end())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            self._add_worker()

    def _add_worker(self) -> None:
        worker = WorkerProcess(self._config)
        self._workers.add(worker)
        self._free.put_nowait(worker)

    async def aclose(self) -> None:
        """End the workers and all that they have started. Responses still being scored get an error."""
        self._closed = True
        self._free.put_nowait(None)
        await asyncio.gather(*(worker.end() for worker in self._workers), *self._ending)

    async def __aenter__(self) -> RewardPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _failed(self, reason: str) -> RewardResult:
        log.warning("reward: %s; using task.error_reward=%g", reason, self._error_reward)
        return RewardResult(self._error_reward, reason)
