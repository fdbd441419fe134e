"""From `task.reward` to a function of (item, response)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from leeway.config.task import TaskConfig
from leeway.registry import Registry
from leeway.rewards.base import Reward
from leeway.tasks.base import Task, TaskError, TaskItem

REWARDS: Registry[Reward] = Registry("leeway.rewards", "leeway.rewards.functions", "REWARD", Reward, "reward")
Scorer = Callable[[TaskItem, str], float]
PlainFunction = Callable[[str, str, dict[str, Any]], float]
"""A reward given as module:function: (response, answer, metadata) -> reward."""


def load_reward(config: TaskConfig, task: Task) -> Scorer:
    """The reward that `config.reward` names, checked against the task's items.

    Raises TaskError for an unknown name, a function that cannot be imported, or items it cannot score.
    """
    reward = _find_reward(config.reward)
    # A generated item is as good as the others; a file may have one bad line.
    for index in range(len(task) if config.files else 1):
        reward.check(task.item(index), task)
    return partial(_score, reward, task)


def _score(reward: Reward, task: Task, item: TaskItem, response: str) -> float:
    return reward.score(item, response, task)


def _find_reward(name: str) -> Reward:
    if ":" in name:
        function = import_function(name)
        return Reward(lambda item, response, task: function(response, item.answer, item.metadata))
    if name in REWARDS:
        return REWARDS[name]
    raise TaskError(f"task.reward: {REWARDS.unknown(name)}, or module:function")


def import_function(path: str) -> PlainFunction:
    """The callable at `module:function`; modules in the working directory are found too."""
    module_name, _, attribute = path.partition(":")
    working_dir = str(Path.cwd())
    if working_dir not in sys.path:
        sys.path.append(working_dir)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module does at import
        raise TaskError(
            f"task.reward: {path!r}: module {module_name!r} cannot be imported: {error}"
        ) from error
    function: PlainFunction | None = getattr(module, attribute, None)
    if not callable(function):
        found = "nothing" if function is None else type(function).__name__
        raise TaskError(
            f"task.reward: {path!r}: {module_name} has {found} named {attribute!r}; "
            "expected a function (response, answer, metadata) -> float"
        )
    return function
