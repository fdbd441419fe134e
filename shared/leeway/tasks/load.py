"""From settings to task."""

from __future__ import annotations

from typing import Any

from leeway.config.task import TaskConfig
from leeway.registry import Registry
from leeway.tasks.base import Task, TaskError, TaskItem, TaskKind

KINDS: Registry[TaskKind] = Registry("leeway.tasks", "leeway.tasks.kinds", "TASK", TaskKind, "task kind")


def task_config(kind: str, **settings: Any) -> TaskConfig:
    """The section `task` of a run, for code that has no RunConfig.

    Raises UsageError for an unknown kind and pydantic's ValidationError for wrong settings.
    """
    return KINDS[kind].settings(kind=kind, **settings)


def load_task(config: TaskConfig) -> Task:
    """The task that `config` describes.

    Raises TaskError that names the setting, its value and what was expected: an unknown data set, an
    unreadable file.
    """
    task = KINDS[config.kind].build(config)
    _check_task(task, config.kind)
    return task


def _check_task(task: Task, kind: str) -> None:
    """Raise TaskError for what an installed kind has built wrongly, before a service meets it."""
    if not isinstance(task, Task):
        raise TaskError(f"task.kind: {kind} built {type(task).__name__}, which is not a leeway.tasks.Task")
    if len(task) < 1:
        raise TaskError(f"task.kind: {kind} has no items with these settings")
    item = task.item(0)
    if not isinstance(item, TaskItem):
        raise TaskError(
            f"task.kind: item 0 of {kind} is {type(item).__name__}; expected leeway.tasks.TaskItem"
        )
    if not isinstance(item.answer, str) or not isinstance(item.prompt, str | tuple):
        raise TaskError(
            f"task.kind: item 0 of {kind} has the answer {item.answer!r} and a prompt of type "
            f"{type(item.prompt).__name__}; expected text as the answer, and text or a tuple of messages"
        )
