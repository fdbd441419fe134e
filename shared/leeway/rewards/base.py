"""What a reward is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from leeway.tasks.base import Task, TaskItem


def accept(item: TaskItem, task: Task) -> None:
    """The check of a reward that can score every item."""


@dataclass(frozen=True)
class Reward:
    """An entry of the registry of rewards.

    `score`: (item, response, task) -> reward; it runs in a subprocess, and whatever it raises becomes
    `task.error_reward`. `check`: raises TaskError for an item that it cannot score; it is called before a run
    starts, with every item of a file and with the first item of a generated task.
    """

    score: Callable[[TaskItem, str, Task], float]
    check: Callable[[TaskItem, Task], None] = accept
