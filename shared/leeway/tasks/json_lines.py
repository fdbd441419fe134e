"""One line of a JSONL file, read strictly: what JSON does not define is refused, and numbers keep their text.

{"answer": 0.00001}         the text "0.00001", not 1e-05; integers may have any length
NaN, Infinity, 1e999        refused: JSON has no such numbers
{"a": 1, "a": 2}            refused: which of the two is meant?
"\\ud800"                    refused: a lone surrogate has no UTF-8
BOM, CRLF                   accepted
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from leeway.tasks.base import TaskError

BOM = b"\xef\xbb\xbf"
MAX_INTEGER_DIGITS = 4300
"""Longest integer that Python reads (sys.get_int_max_str_digits); as an answer an integer stays text."""


@dataclass(frozen=True)
class WrittenNumber:
    """A number as it is written."""

    text: str


@dataclass(frozen=True)
class _Constant:
    """NaN, Infinity or -Infinity, which Python reads and JSON does not define."""

    name: str


class _Duplicate(ValueError):
    """An object with two fields of the same name."""


def line_content(line: bytes) -> bytes:
    """`line` without white space, line end and BOM; empty for a blank line."""
    return line.strip().removeprefix(BOM).strip()


def read_record(line: bytes, where: str) -> dict[str, Any]:
    """The object in `line`; numbers are WrittenNumber. `where`: file and line, for messages.

    Raises TaskError that names `where` and, if it is known, the field.
    """
    try:
        record = json.loads(
            line_content(line).decode(),
            parse_float=WrittenNumber,
            parse_int=WrittenNumber,
            parse_constant=_Constant,
            object_pairs_hook=_unique,
        )
    except UnicodeDecodeError as error:
        raise TaskError(f"{where}: not UTF-8 (byte {error.start}: {error.reason})") from error
    except json.JSONDecodeError as error:
        raise TaskError(
            f"{where}: not JSON ({error.msg} at column {error.colno}); expected one JSON object per line"
        ) from error
    except _Duplicate as error:
        raise TaskError(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: not usable JSON ({error})") from error
    if not isinstance(record, dict):
        raise TaskError(f"{where}: expected a JSON object, got {json_name(record)}")
    for key, value in record.items():
        _check_value(key, f"{where}: field {key!r}")
        _check_value(value, f"{where}: field {key!r}")
    return record


def plain_value(value: Any, where: str) -> Any:
    """`value` with Python's numbers. Raises TaskError for a number that Python cannot hold."""
    if isinstance(value, dict):
        return {key: plain_value(inner, where) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain_value(inner, where) for inner in value]
    if not isinstance(value, WrittenNumber):
        return value
    text = value.text
    if text.removeprefix("-").isdigit():
        if len(text) > MAX_INTEGER_DIGITS:
            raise TaskError(
                f"{where}: an integer of {len(text)} digits; expected at most {MAX_INTEGER_DIGITS}, or text"
            )
        return int(text)
    number = float(text)
    if math.isinf(number):
        raise TaskError(
            f"{where}: {text[:80]} is beyond the range of floating-point numbers; write it as text"
        )
    return number


def json_name(value: Any) -> str:
    """What `value` is in the words of JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, _Constant):
        return value.name
    names = {dict: "an object", list: "a list", str: "text", WrittenNumber: "a number"}
    return names.get(type(value), type(value).__name__)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _Duplicate(f"field {twice!r} is duplicated")
    return record


def _check_value(value: Any, where: str) -> None:
    """Raise TaskError if `value` contains what JSON does not define, or text that UTF-8 cannot encode."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_value(key, where)
            _check_value(inner, where)
    elif isinstance(value, list):
        for inner in value:
            _check_value(inner, where)
    elif isinstance(value, _Constant):
        raise TaskError(
            f"{where} is {value.name}, which is not a value of JSON; correct the value, or write it as text"
        )
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise TaskError(f"{where} contains a lone surrogate, which cannot be encoded as UTF-8") from error
