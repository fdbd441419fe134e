"""What a task is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from leeway.errors import UsageError

Message = Mapping[str, str]


class TaskError(UsageError, ValueError):
    """A task that cannot be loaded or a reward that cannot be used; says what, with which value, and why."""


@dataclass(frozen=True)
class TaskItem:
    """One prompt with its answer."""

    index: int
    """Position in the task; with the task's configuration it determines everything below."""
    prompt: str | tuple[Message, ...]
    """Text, or chat messages ({"role": ..., "content": ...})."""
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the task's verifier or a `module:function` reward may need besides the answer."""


@runtime_checkable
class Task(Protocol):
    """A finite, indexed set of items. The same configuration gives the same items in every process."""

    @property
    def name(self) -> str:
        """For messages and reports."""
        ...

    def __len__(self) -> int: ...

    def item(self, index: int) -> TaskItem:
        """Item `index`, 0 <= index < len(self); IndexError otherwise."""
        ...

    def verify(self, item: TaskItem, response: str) -> float:
        """The task's own score of `response`, usually in [0, 1]. TaskError if the task has none."""
        ...


def check_index(task: Task, index: int) -> None:
    """IndexError unless 0 <= index < len(task)."""
    if not 0 <= index < len(task):
        raise IndexError(f"task {task.name} has items 0 to {len(task) - 1}, not {index}")
