"""Trying a reward before a run: what would fail in a sampler after minutes fails here in seconds."""

from __future__ import annotations

import asyncio

from leeway.config.task import TaskConfig
from leeway.rewards.load import is_third_party, load_reward
from leeway.rewards.worker_process import ScoringError, TaskUnusable, WorkerDied, WorkerProcess
from leeway.tasks.base import Task, TaskError, TaskItem
from leeway.tasks.load import load_task


def check_reward(config: TaskConfig, task: Task | None = None) -> float:
    """Check that the reward can score the task's items, and score the answer of item 0 as a response.

    A reward that is not part of Leeway is imported and called in a worker like those of a run, with the same
    limits on time and memory. `task`: the task of `config` if it is loaded already. Returns the reward.
    Raises TaskError: what cannot be loaded, what the function takes and gets, or what it did.
    """
    task = load_task(config) if task is None else task
    item = task.item(0)
    if not is_third_party(config):
        return load_reward(config, task)(item, item.answer)
    return asyncio.run(_try(config, item))


async def _try(config: TaskConfig, item: TaskItem) -> float:
    worker = WorkerProcess(config, quiet=True)
    try:
        return await worker.score(item.index, item.answer, config.reward_timeout_s)
    except TaskUnusable as error:
        raise TaskError(str(error)) from error
    except ScoringError as error:
        raise TaskError(
            f"task.reward: {config.reward} cannot score a response: {error} (tried with the answer of "
            f"item {item.index}, {item.answer[:80]!r}, as the response). Environment variables reach it only "
            "if task.reward_env names them"
        ) from error
    except WorkerDied as error:
        raise TaskError(
            f"task.reward: the process that imports {config.reward} ended before it scored a response: does "
            "the module exit or crash when it is imported?"
        ) from error
    finally:
        await worker.end()
