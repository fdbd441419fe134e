"""From settings to task."""

from __future__ import annotations

from typing import Any

from leeway.config.task import TaskConfig
from leeway.registry import Registry
from leeway.tasks.base import Task, TaskKind

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
    return KINDS[config.kind].build(config)
