"""Reward functions: pure functions of (item, response)."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from leeway.config import TaskConfig
from leeway.tasks.base import Task, TaskError, TaskItem

Reward = Callable[[TaskItem, str], float]

# 1,234 · -3.5 · 7; a minus sign counts unless it follows a digit or a closing bracket, as in 10-5.
_NUMBER = re.compile(r"(?:(?<![\d)\]])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def score_exact(item: TaskItem, response: str) -> float:
    """1 if the response is the answer, white space at the ends aside."""
    return float(response.strip() == item.answer.strip())


def find_last_number(text: str) -> Fraction | None:
    """The last number in `text`, exactly; None if there is none."""
    found = _NUMBER.findall(text)
    return Fraction(found[-1].replace(",", "")) if found else None


def score_last_number(item: TaskItem, response: str) -> float:
    """1 if the last number in the response equals the answer. ValueError if the answer is not a number."""
    expected = _read_number(item.answer)
    if expected is None:
        raise ValueError(
            f"reward last_number: the answer of item {item.index}, {item.answer!r}, is no number"
        )
    return float(find_last_number(response) == expected)


def build_reward(config: TaskConfig, task: Task) -> Reward:
    """The reward function that `config.reward` names. TaskError if there is none."""
    if config.reward == "exact":
        return score_exact
    if config.reward == "last_number":
        return score_last_number
    if config.reward == "verifier":
        return task.verify
    if ":" in config.reward:
        function = import_function(config.reward)
        return lambda item, response: function(response, item.answer, item.metadata)
    raise TaskError(
        f"task.reward: {config.reward!r}; expected exact, last_number, verifier or module:function"
    )


def check_reward(config: TaskConfig, task: Task) -> None:
    """TaskError if the reward cannot work on this task; looks at its first item, in a file at all items."""
    build_reward(config, task)
    first = task.item(0)
    if config.reward == "last_number":
        for item in map(task.item, range(len(task) if config.kind == "jsonl" else 1)):
            if _read_number(item.answer) is None:
                raise TaskError(
                    f"task.reward: last_number, but the answer of item {item.index} of task {task.name} is "
                    f"{item.answer!r}, which is no number"
                )
    if config.reward == "verifier":
        task.verify(first, first.answer)


def import_function(path: str) -> Callable[[str, str, dict[str, Any]], float]:
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
    function = getattr(module, attribute, None)
    if not callable(function):
        found = "nothing" if function is None else type(function).__name__
        raise TaskError(
            f"task.reward: {path!r}: {module_name} has {found} named {attribute!r}; "
            "expected a function (response, answer, metadata) -> float"
        )
    return function


def _read_number(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(text.strip())
    return Fraction(match.group().replace(",", "")) if match else None
