"""1 if the last number in the response equals the answer."""

from __future__ import annotations

import re
from fractions import Fraction

from leeway.rewards.base import Reward
from leeway.tasks.base import Task, TaskError, TaskItem

# 1,234 · -3.5 · 7; a minus sign counts unless it follows a digit or a closing bracket, as in 10-5.
_NUMBER = re.compile(r"(?:(?<![\d)\]])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def find_last_number(text: str) -> Fraction | None:
    """The last number in `text`, exactly; None if there is none."""
    found = _NUMBER.findall(text)
    return Fraction(found[-1].replace(",", "")) if found else None


def read_number(text: str) -> Fraction | None:
    """The number that `text` consists of; None if it is something else."""
    match = _NUMBER.fullmatch(text.strip())
    return Fraction(match.group().replace(",", "")) if match else None


def score_last_number(item: TaskItem, response: str, task: Task) -> float:
    """1 if the last number in the response equals the answer, else 0. ValueError: the answer is no number."""
    expected = read_number(item.answer)
    if expected is None:
        raise ValueError(
            f"reward last_number: the answer of item {item.index}, {item.answer!r}, is not a number"
        )
    return float(find_last_number(response) == expected)


def check_last_number(item: TaskItem, task: Task) -> None:
    """Raise TaskError if the answer is not a number."""
    if read_number(item.answer) is None:
        raise TaskError(
            f"task.reward: last_number, but the answer of item {item.index} of task {task.name} is "
            f"{item.answer!r}, which is not a number"
        )


REWARD = Reward(score_last_number, check_last_number)
