"""What is wrong with a configuration, in one line per problem: path, value, and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from leeway.config.base import Section
from leeway.config.choice import UNKNOWN_NAME, Choice, choice_of
from leeway.config.run import RunConfig

# "sink" still suggests "sync", and "tis_clp" the key "clip".
SIMILAR = 0.5


def explain(error: Mapping[str, Any], data: Any) -> str:
    """One line for one of pydantic's errors about `data`, the whole configuration."""
    loc: tuple[int | str, ...] = error["loc"]
    path = ".".join(str(part) for part in loc) or "configuration"
    if path.startswith("redis"):
        error = {**error, "input": "***"}  # it may hold a password
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key (value {_shown(error['input'])}); {_expected(loc, data)}"
    if error["type"] == "missing":
        return f"{path}: required, but not given"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] in ("value_error", UNKNOWN_NAME):
        return f"{path}: {message}"
    return f"{path}: got {_shown(error['input'])} ({type(error['input']).__name__}); {message}"


def _expected(loc: tuple[int | str, ...], data: Any) -> str:
    """What an unknown key may have meant, and which keys there are."""
    key, section = str(loc[-1]), str(loc[0])
    choice = choice_of(RunConfig.model_fields[section].metadata) if len(loc) == 2 else None
    if choice is not None:
        return _expected_of_choice(key, section, choice, data[section].get(choice.key, choice.default))
    allowed = _fields_at(loc[:-1])
    return f"{_guess(key, allowed)}allowed: {', '.join(allowed)}"


def _expected_of_choice(key: str, section: str, choice: Choice[Section], name: str) -> str:
    allowed = [*choice.own_keys(name), *choice.common_keys]
    owners = [other for other in choice.registry if key in choice.own_keys(other)]
    guess = _guess(key.removeprefix(f"{name}_"), allowed)
    if owners:
        guess = (
            f"it is a key of {choice.key} {', '.join(owners)}: set the {choice.key} with it, --set "
            f"'{section}={{{choice.key}: {owners[0]}, {key}: ...}}', or remove it: --set "
            f"'{section}={{{choice.key}: {name}}}' replaces the whole section; "
        )
    return f"{guess}{choice.key} {name} allows: {', '.join(allowed)}"


def _guess(key: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(key, allowed, n=1, cutoff=SIMILAR)
    return f"did you mean {close[0]!r}? " if close else ""


def _fields_at(path: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for key in path:
        field = model.model_fields.get(str(key))
        if field is None or not (
            isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        ):
            return []
        model = field.annotation
    return list(model.model_fields)


def _shown(value: Any) -> str:
    """A value for a message, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a number that is too long to show"
    return text if len(text) <= 200 else f"{text[:200]}..."
