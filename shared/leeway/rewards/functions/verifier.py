"""The score that the task itself gives, for example that of a reasoning-gym data set."""

from __future__ import annotations

from leeway.rewards.base import Reward
from leeway.tasks.base import Task, TaskItem


def score_verifier(item: TaskItem, response: str, task: Task) -> float:
    """What the task's verifier returns."""
    return task.verify(item, response)


def check_verifier(item: TaskItem, task: Task) -> None:
    """Raise TaskError if the task has no verifier."""
    task.verify(item, item.answer)


REWARD = Reward(score_verifier, check_verifier)
