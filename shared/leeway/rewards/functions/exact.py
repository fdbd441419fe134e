"""1 if the response is the answer."""

from __future__ import annotations

from leeway.rewards.base import Reward
from leeway.tasks.base import Task, TaskItem


def score_exact(item: TaskItem, response: str, task: Task) -> float:
    """1 if the response is the answer, ignoring white space at both ends; else 0."""
    return float(response.strip() == item.answer.strip())


REWARD = Reward(score_exact)
