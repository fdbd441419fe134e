"""From `task.reward` to a function of (item, response)."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leeway.config.task import TaskConfig
from leeway.registry import Registry
from leeway.rewards.base import Reward
from leeway.rewards.callables import call_reward, choose_arguments, read_reward
from leeway.tasks.base import Task, TaskError, TaskItem

REWARDS: Registry[Reward] = Registry("leeway.rewards", "leeway.rewards.functions", "REWARD", Reward, "reward")
Scorer = Callable[[TaskItem, str], float]


def load_reward(config: TaskConfig, task: Task) -> Scorer:
    """The reward that `config.reward` names, checked against the task's items.

    The scorer raises TypeError or ValueError if the reward returns anything but a finite number. Raises
    TaskError for an unknown name, a function that cannot be imported or called, or items it cannot score.
    """
    reward = _find_reward(config)
    # A generated item is as good as the others; a file may have one bad line.
    for index in range(len(task) if config.files else 1):
        reward.check(task.item(index), task)
    return lambda item, response: read_reward(reward.score(item, response, task))


def is_third_party(config: TaskConfig) -> bool:
    """True if the reward's code is not part of Leeway: it may hang, exit or crash when it is imported."""
    return config.reward not in REWARDS.builtin


def _find_reward(config: TaskConfig) -> Reward:
    name = config.reward
    if ":" in name:
        function = import_function(name)
        arguments = choose_arguments(function, name)
        return Reward(lambda item, response, task: call_reward(function, arguments, item, response, config))
    if name not in REWARDS:
        raise TaskError(f"task.reward: {REWARDS.unknown(name)}, or module:function{_as_module(name)}")
    reward = REWARDS[name]
    for part, arguments in (("score", ["item", "response", "task"]), ("check", ["item", "task"])):
        _check_arity(getattr(reward, part), f"task.reward: {name}: {part}", arguments)
    return reward


def _check_arity(function: Callable[..., Any], what: str, arguments: list[str]) -> None:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise TaskError(
            f"{what}{inspect.signature(function)} cannot be called with ({', '.join(arguments)}): {error}"
        ) from error
    except ValueError:
        return  # written in C: it has no signature


def import_function(path: str) -> Callable[..., Any]:
    """The callable at `module:function`.

    The module is looked up like any other, and then in the working directory.
    """
    module_name, _, attribute = path.partition(":")
    working_dir = str(Path.cwd())
    if working_dir not in sys.path:
        sys.path.append(working_dir)
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # whatever the module does at import, also sys.exit
        raise TaskError(
            f"task.reward: {path!r}: module {module_name!r} cannot be imported (looked in PYTHONPATH and "
            f"{working_dir}): {type(error).__name__}: {error}{_as_module(path)}"
        ) from error
    function: Any = module
    for name in attribute.split("."):
        function = getattr(function, name, None)
    if not callable(function):
        found = "nothing" if function is None else type(function).__name__
        raise TaskError(
            f"task.reward: {path!r}: {module_name}{_shadowed(module, module_name)} has {found} named "
            f"{attribute!r}; expected a function, for example def {attribute or 'score'}(response, answer)"
        )
    found_function: Callable[..., Any] = function
    return found_function


def _as_module(path: str) -> str:
    """How to write a function that is given by a file (`dir/own.py:score`) or with a dot (`own.score`)."""
    file, _, function = path.partition(":")
    if not function:
        file, _, function = path.rpartition(".")
    module = ".".join(Path(file.removesuffix(".py")).parts)
    if f"{module}:{function}" == path or not re.fullmatch(r"\w+(\.\w+)*:\w+", f"{module}:{function}"):
        return ""
    return f"; did you mean {module}:{function}?"


def _shadowed(module: Any, name: str) -> str:
    """A remark if the working directory has a file for this module, and another one was imported."""
    local = Path.cwd() / (name.replace(".", "/") + ".py")
    origin = getattr(module, "__file__", None)
    if not local.is_file() or (origin and Path(origin).resolve() == local.resolve()):
        return ""
    return f" ({origin or 'built into Python'}, which is found before {local}: rename that file)"
