"""`python -m leeway_host.preflight.reward`: the reward of one response, under the limits of a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from leeway.config import RunConfig
from leeway.findings import Finding, run_trial
from leeway.rewards import RewardPool, load_reward
from leeway.rewards.pool import RewardResult
from leeway.tasks import load_task

CHECK = "reward"


def try_reward(config: RunConfig, model: str) -> Iterator[Finding | str]:
    """Score the first item's own answer as a response, in a process with the limits of the run."""
    yield "loading the task"
    task = load_task(config.task)
    yield f"importing the reward {config.task.reward}"
    load_reward(config.task, task)
    yield f"scoring one response with {config.task.reward}"
    result, seconds = asyncio.run(_score(config, task.item(0).answer))
    yield judge_reward(config, result, seconds)


async def _score(config: RunConfig, response: str) -> tuple[RewardResult, float]:
    async with RewardPool(config.task, workers=1) as pool:
        await pool.score(0, response)  # starts the process
        started = time.monotonic()
        return await pool.score(0, response), time.monotonic() - started


def judge_reward(config: RunConfig, result: RewardResult, seconds: float) -> Finding:
    """Whether the reward could be computed, and fast enough."""
    task = config.task
    if result.error is not None:
        text = f"task.reward {task.reward} fails when item 0 is answered with its own answer: {result.error}"
        return Finding("error", CHECK, text, "correct the reward function; try it on one response")
    text = f"{task.reward}: item 0 answered with its own answer gives {result.value:g} after {seconds:.2f} s"
    if seconds > task.reward_timeout_s / 2:
        step = "raise task.reward_timeout_s; slower responses get task.error_reward"
        return Finding("warning", CHECK, f"{text}, of task.reward_timeout_s={task.reward_timeout_s:g}", step)
    return Finding("ok", CHECK, text)


if __name__ == "__main__":
    run_trial(CHECK, try_reward)
