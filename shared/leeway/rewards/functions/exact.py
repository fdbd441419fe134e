"""1 if the response is the answer, as text: 5.0 is not 5, and a typographic minus is not a hyphen."""

from __future__ import annotations

import unicodedata

from leeway.rewards.base import Reward
from leeway.tasks.base import Task, TaskError, TaskItem


def score_exact(item: TaskItem, response: str, task: Task) -> float:
    """1 if the response is the answer, ignoring white space at both ends; else 0.

    Texts are compared in Unicode's normal form C: an accent may be a character of its own in one of them.
    """
    return float(_normal(response) == _normal(item.answer))


def check_exact(item: TaskItem, task: Task) -> None:
    """Raise TaskError if the answer is empty: silence would be rewarded."""
    if not item.answer.strip():
        raise TaskError(
            f"task.reward: exact, but the answer of item {item.index} of task {task.name} is empty"
            f"{item.place}; use verifier or module:function for a task without answers"
        )


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text.strip())


REWARD = Reward(score_exact, check_exact)
