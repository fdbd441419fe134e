"""The share of the answer that the response starts with."""

from __future__ import annotations

from itertools import takewhile

from leeway.rewards import Reward
from leeway.tasks import Task, TaskError, TaskItem


def score(item: TaskItem, response: str, task: Task) -> float:
    """In [0, 1]. Runs in its own process: it may be slow, fail or crash."""
    pairs = zip(response.strip(), item.answer, strict=False)
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return right / len(item.answer)


def check(item: TaskItem, task: Task) -> None:
    """Called before a run starts; without it every item is accepted."""
    if not item.answer:
        raise TaskError(f"task.reward: prefix, but the answer of item {item.index} of {task.name} is empty")


REWARD = Reward(score, check)
