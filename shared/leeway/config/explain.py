"""What is wrong with a configuration, in one line per problem: path, value, and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from leeway.config.correction import COMMON_KEYS, DEFAULT_METHOD, own_keys
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
    if error["type"] in ("value_error", "unknown_method"):
        return f"{path}: {message}"
    return f"{path}: got {_shown(error['input'])} ({type(error['input']).__name__}); {message}"


def _expected(loc: tuple[int | str, ...], data: Any) -> str:
    """What an unknown key may have meant, and which keys there are."""
    key = str(loc[-1])
    if loc[0] == "correction" and len(loc) == 2:
        return _expected_of_method(key, data["correction"].get("method", DEFAULT_METHOD))
    allowed = _fields_at(loc[:-1])
    return f"{_guess(key, allowed)}allowed: {', '.join(allowed)}"


def _expected_of_method(key: str, method: str) -> str:
    from leeway.corrections.registry import METHODS

    own = own_keys(METHODS[method].settings)
    owners = [name for name in METHODS if key in own_keys(METHODS[name].settings)]
    guess = _guess(key.removeprefix(f"{method}_"), [*own, *COMMON_KEYS])
    if owners:
        guess = (
            f"it is a key of method {', '.join(owners)}; to change the method, replace the whole section: "
            f"--set 'correction={{method: {method}}}'; "
        )
    return f"{guess}method {method} allows: {', '.join([*own, *COMMON_KEYS])}"


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
