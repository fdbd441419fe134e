"""From configuration to task."""

from __future__ import annotations

from leeway.config import TaskConfig
from leeway.tasks.base import Task, TaskError
from leeway.tasks.scoring import check_reward


def load_task(config: TaskConfig) -> Task:
    """The task that `config` names, with its reward checked.

    TaskError names the setting, its value and what was expected: unknown data set, unreadable file, a
    reward that cannot be imported or does not fit the task.
    """
    task = _build_task(config)
    check_reward(config, task)
    return task


def _build_task(config: TaskConfig) -> Task:
    if config.kind == "digits":
        from leeway.tasks.digits import DigitsTask

        return DigitsTask(config.params, config.size, config.seed)
    if config.kind == "jsonl":
        from leeway.tasks.jsonl import JsonlTask

        if not config.path:
            raise TaskError("task.path is required for kind jsonl")
        return JsonlTask(config.path, config.prompt_field, config.answer_field)
    if config.kind == "reasoning_gym":
        from leeway.tasks.reasoning import ReasoningGymTask

        if not config.name:
            raise TaskError("task.name is required for kind reasoning_gym, for example chain_sum")
        return ReasoningGymTask(config.name, config.params, config.size, config.seed)
    raise TaskError(f"task.kind: {config.kind!r}; expected reasoning_gym, jsonl or digits")
