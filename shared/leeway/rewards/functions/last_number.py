"""1 if the last number in the response equals the answer. How numbers are read: leeway.rewards.numbers."""

from __future__ import annotations

from leeway.rewards.base import Reward
from leeway.rewards.numbers import find_last_number, read_number, same_number
from leeway.tasks.base import Task, TaskError, TaskItem


def score_last_number(item: TaskItem, response: str, task: Task) -> float:
    """1 if the last number in the response equals the answer, else 0. ValueError: the answer is no number."""
    expected = read_number(item.answer)
    if expected is None:
        raise ValueError(
            f"reward last_number: the answer of item {item.index}, {item.answer[:200]!r}, is not a number"
        )
    found = find_last_number(response)
    return float(found is not None and same_number(expected, found))


def check_last_number(item: TaskItem, task: Task) -> None:
    """Raise TaskError if the answer is not a number."""
    if read_number(item.answer) is None:
        raise TaskError(
            f"task.reward: last_number, but the answer of item {item.index} of task {task.name} is "
            f"{item.answer[:200]!r}, which is not a number{item.place}"
        )


REWARD = Reward(score_last_number, check_last_number)
