"""Functions of users as rewards: which arguments they get, and what they may return.

A function gets its arguments by name, and only those that it takes:

    response    the text that the model generated
    answer      the item's answer, as text
    prompt      the item's prompt: text, or a list of chat messages
    messages    the chat messages that were sent, with task.system_prompt and task.prompt_suffix
    metadata    the item's other fields, a dict
    item        all of the item (leeway.tasks.TaskItem)
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from leeway.config.task import TaskConfig
from leeway.tasks.base import TaskError, TaskItem
from leeway.tasks.prompts import build_messages

ARGUMENTS: dict[str, Callable[[TaskItem, str, TaskConfig], Any]] = {
    "response": lambda item, response, config: response,
    "answer": lambda item, response, config: item.answer,
    "prompt": lambda item, response, config: (
        item.prompt if isinstance(item.prompt, str) else [dict(message) for message in item.prompt]
    ),
    "messages": lambda item, response, config: [dict(m) for m in build_messages(item, config)],
    "metadata": lambda item, response, config: item.metadata,
    "item": lambda item, response, config: item,
}
OFFERED = ", ".join(ARGUMENTS)
# Names of these things elsewhere: TRL, verl, lm-evaluation-harness.
_MEANT = {
    **dict.fromkeys(("completion", "completions", "solution_str", "output", "generation"), "response"),
    **dict.fromkeys(("ground_truth", "solution", "target", "label", "gold", "truth"), "answer"),
    **dict.fromkeys(("prompts", "question"), "prompt"),
    **dict.fromkeys(("extra_info", "meta", "info"), "metadata"),
}
_LISTS = {"completions", "prompts"}


def choose_arguments(function: Callable[..., Any], path: str) -> list[str]:
    """The names of ARGUMENTS that `function` takes. `path`: its name in messages.

    Raises TaskError for what cannot be called with them: a required parameter that Leeway does not pass, a
    positional-only one, an async function, a generator, a class.
    """
    _check_kind(function, path)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"task.reward: {path} has no signature that Python can read; wrap it in a function that "
            f"takes some of: {OFFERED}"
        ) from error
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        chosen = list(ARGUMENTS)
    else:
        chosen = [name for name in ARGUMENTS if name in signature.parameters]
    problems = [_problem(parameter) for parameter in parameters if _is_unmet(parameter)]
    problems += [
        f"{name!r} would keep its default, because Leeway passes it as {_MEANT[name]!r}: rename it"
        for name, parameter in signature.parameters.items()
        if parameter.default is not parameter.empty and _MEANT.get(name, name) not in signature.parameters
    ]
    if problems:
        raise TaskError(
            f"task.reward: {path}{signature}: {'; '.join(problems)}. Leeway scores one response at a time "
            f"and passes by name whichever of these the function takes: {OFFERED}"
        )
    if not chosen:
        raise TaskError(f"task.reward: {path}{signature} takes nothing that Leeway passes: {OFFERED}")
    return chosen


def _check_kind(function: Callable[..., Any], path: str) -> None:
    call = function if inspect.isroutine(function) else type(function).__call__
    wrong = None
    if inspect.isclass(function):
        wrong = "a class; expected a function, or an instance that can be called"
    elif any(inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f) for f in (function, call)):
        wrong = "an async function; expected a plain one (asyncio.run can call the other from it)"
    elif any(inspect.isgeneratorfunction(f) for f in (function, call)):
        wrong = "a generator; expected a function that returns a number"
    if wrong:
        raise TaskError(f"task.reward: {path} is {wrong}")


def _is_unmet(parameter: inspect.Parameter) -> bool:
    """True for a parameter that needs a value and does not get one."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return False
    given = parameter.name in ARGUMENTS and parameter.kind is not parameter.POSITIONAL_ONLY
    return not given and parameter.default is parameter.empty


def _problem(parameter: inspect.Parameter) -> str:
    name = parameter.name
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return f"{name!r} is positional-only, and arguments are passed by name"
    meant = f"; rename it to {_MEANT[name]!r}?" if name in _MEANT else ""
    lists = " (TRL passes lists of responses and expects a list of rewards)" if name in _LISTS else ""
    return f"it requires {name!r}, which Leeway does not pass{meant}{lists}"


def call_reward(
    function: Callable[..., Any], names: list[str], item: TaskItem, response: str, config: TaskConfig
) -> Any:
    """What `function` returns for the arguments `names`."""
    return function(**{name: ARGUMENTS[name](item, response, config) for name in names})


def read_reward(value: Any) -> float:
    """A reward as a finite float: from bool, int, float, and scalars of NumPy, torch, fractions and decimal.

    Raises TypeError for anything else, and ValueError for a number that is not finite.
    """
    if not _is_scalar(value):
        text = textwrap.shorten(repr(value), 80)
        raise TypeError(f"it returned {text} ({type(value).__name__}); expected one number{_advice(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}; expected a finite number")
    return number


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Real):
        return True
    # Scalars of NumPy and torch, and decimal.Decimal; an array with one element is none.
    return not isinstance(value, str) and hasattr(value, "__float__") and not getattr(value, "ndim", 0)


def _advice(value: Any) -> str:
    if value is None:
        return ": is a return missing?"
    if isinstance(value, list | tuple):
        return ": Leeway scores one response at a time"
    if isinstance(value, Mapping):
        return ": return the value that counts"
    return ""
