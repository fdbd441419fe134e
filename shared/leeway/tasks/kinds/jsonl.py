"""Prompts and answers from a file with one JSON object per line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from leeway.config.task import TaskConfig
from leeway.tasks.base import Message, TaskError, TaskItem, TaskKind, check_index

MAX_LINE_BYTES = 16 << 20


class JsonlConfig(TaskConfig):
    """The lines of a file, one JSON object per line."""

    kind: Literal["jsonl"] = "jsonl"
    path: str = Field(min_length=1)
    """The JSONL file."""
    prompt_field: str = "prompt"
    """Field that contains the prompt: text, or a list of chat messages."""
    answer_field: str = "answer"
    """Field that contains the answer: text or a number."""

    @property
    def files(self) -> tuple[Path, ...]:
        return (Path(self.path),)


class JsonlTask:
    """The lines of a file. Every line is checked when the task is loaded; blank lines are skipped.

    Fields other than prompt and answer become the item's metadata.
    """

    def __init__(self, config: JsonlConfig) -> None:
        self._path = Path(config.path)
        self._items = _read_items(self._path, config.prompt_field, config.answer_field)

    @property
    def name(self) -> str:
        return str(self._path)

    def __len__(self) -> int:
        return len(self._items)

    def item(self, index: int) -> TaskItem:
        check_index(self, index)
        return self._items[index]

    def verify(self, item: TaskItem, response: str) -> float:
        raise TaskError(
            f"task.reward: verifier, but a JSONL task ({self._path}) has none; "
            "use exact, last_number or module:function"
        )


def _read_items(path: Path, prompt_field: str, answer_field: str) -> list[TaskItem]:
    if not path.is_file():
        raise TaskError(f"task.path: {path} is not a file (looked in {Path.cwd()})")
    items: list[TaskItem] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise TaskError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    record = _read_record(line, f"{path}, line {number}")
                    where = f"{path}, line {number}"
                    items.append(_build_item(len(items), record, prompt_field, answer_field, where))
    except OSError as error:
        raise TaskError(f"task.path: {path} cannot be read: {error.strerror}") from error
    if not items:
        raise TaskError(f"task.path: {path} has no items; expected one JSON object per line")
    return items


def _read_record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig").strip())
    except UnicodeDecodeError as error:
        raise TaskError(f"{where}: not UTF-8 (byte {error.start}: {error.reason})") from error
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: not usable JSON ({error})") from error
    if not isinstance(record, dict):
        raise TaskError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record


def _build_item(
    index: int, record: dict[str, Any], prompt_field: str, answer_field: str, where: str
) -> TaskItem:
    for name, config_key in ((prompt_field, "task.prompt_field"), (answer_field, "task.answer_field")):
        if name not in record:
            present = ", ".join(sorted(record)) or "none"
            raise TaskError(f"{where}: field {name!r} ({config_key}) is missing; the object has: {present}")
    answer = record[answer_field]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TaskError(
            f"{where}: field {answer_field!r} must be text or a number, got {type(answer).__name__}"
        )
    metadata = {key: value for key, value in record.items() if key not in (prompt_field, answer_field)}
    prompt = _read_prompt(record[prompt_field], prompt_field, where)
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise TaskError(f"{where}: contains a lone surrogate, which cannot be encoded as UTF-8") from error
    return TaskItem(index=index, prompt=prompt, answer=str(answer), metadata=metadata)


def _read_prompt(value: Any, field: str, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value:
            raise TaskError(f"{where}: field {field!r} is empty")
        return value
    is_chat = (
        isinstance(value, list)
        and value
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
    )
    if not is_chat:
        raise TaskError(
            f'{where}: field {field!r} must be text or a list of {{"role": ..., "content": ...}} with text, '
            f"got {type(value).__name__}"
        )
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


TASK = TaskKind(JsonlConfig, JsonlTask)
