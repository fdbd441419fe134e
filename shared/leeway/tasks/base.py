"""What a task is, and what a kind of task is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from leeway.config.task import TaskConfig
from leeway.errors import UsageError

Message = Mapping[str, str]


class TaskError(UsageError, ValueError):
    """A task that cannot be loaded, or a reward that cannot be used with it; names setting and value."""


@dataclass(frozen=True)
class TaskItem:
    """One prompt with its answer."""

    index: int
    """Position in the task; together with the task's settings it determines everything below."""
    prompt: str | tuple[Message, ...]
    """Text, or chat messages ({"role": ..., "content": ...})."""
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the task's verifier or a `module:function` reward may need besides the answer."""
    source: str = ""
    """Where the item was read, for messages: file and line. Empty for generated items."""

    @property
    def place(self) -> str:
        """`source` in brackets, to be appended to a message."""
        return f" ({self.source})" if self.source else ""


@runtime_checkable
class Task(Protocol):
    """A finite, indexed set of items. The same settings give the same items in every process."""

    @property
    def name(self) -> str:
        """For messages and reports."""
        ...

    def __len__(self) -> int: ...

    def item(self, index: int) -> TaskItem:
        """Item `index`, 0 <= index < len(self); IndexError otherwise."""
        ...

    def verify(self, item: TaskItem, response: str) -> float:
        """The task's own score of `response`, usually in [0, 1]. Raises TaskError if the task has none."""
        ...


@dataclass(frozen=True)
class TaskKind:
    """An entry of the registry of tasks.

    `settings`: the model of the section `task` for this kind; its field `kind` is a Literal of the kind's
    name. `build`: from those settings to the task; raises TaskError for settings that cannot be used.
    """

    settings: type[TaskConfig]
    build: Callable[[Any], Task]


def check_index(task: Task, index: int) -> None:
    """Raise IndexError unless 0 <= index < len(task)."""
    if not 0 <= index < len(task):
        raise IndexError(f"task {task.name} has items 0 to {len(task) - 1}, not {index}")
