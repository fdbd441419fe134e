"""Prompts and answers from a file with one JSON object per line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from leeway.config.base import UserPath
from leeway.config.task import TaskConfig
from leeway.tasks.base import Message, TaskError, TaskItem, TaskKind, check_index
from leeway.tasks.json_lines import WrittenNumber, json_name, line_content, plain_value, read_record

MAX_LINE_BYTES = 16 << 20
FORMATS = {
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"version https://git-lfs": "a pointer of Git LFS without the content (git lfs pull)",
}
"""First bytes of files that are given by mistake."""


ROLES_ELSEWHERE = {
    **dict.fromkeys(("human", "User", "Human"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model", "Assistant"), "assistant"),
    "System": "system",
}
"""Roles of other formats (ShareGPT, Gemini) -> the role that chat templates know."""


class JsonlConfig(TaskConfig):
    """The lines of a file, one JSON object per line."""

    kind: Literal["jsonl"] = "jsonl"
    path: UserPath = Field(min_length=1)
    """The JSONL file."""
    prompt_field: str = "prompt"
    """Field that contains the prompt: text, or a list of chat messages."""
    answer_field: str = "answer"
    """Field that contains the answer: text or a number, which is kept as it is written (0.00001, 5.0)."""

    @property
    def files(self) -> tuple[Path, ...]:
        return (Path(self.path),)


class JsonlTask:
    """The lines of a file. Every line is checked when the task is loaded; blank lines are skipped.

    Fields other than prompt and answer become the item's metadata. Values: see leeway.tasks.json_lines.
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
    items: list[TaskItem] = []
    try:
        if path.is_dir():
            raise TaskError(
                f"task.path: {path} is a directory; expected a file with one JSON object per line"
            )
        if not path.is_file():
            raise TaskError(f"task.path: {path} is not a file (looked in {Path.cwd()})")
        with path.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), start=1):
                where = f"{path}, line {number}"
                if number == 1:
                    _check_format(line, path)
                if len(line) > MAX_LINE_BYTES:
                    raise TaskError(f"{where}: longer than {MAX_LINE_BYTES >> 20} MiB")
                if line_content(line):
                    record = read_record(line, where)
                    items.append(_build_item(len(items), record, prompt_field, answer_field, where))
    except OSError as error:
        raise TaskError(f"task.path: {path} cannot be read: {error.strerror}") from error
    if not items:
        raise TaskError(f"task.path: {path} has no items; expected one JSON object per line")
    return items


def _check_format(start: bytes, path: Path) -> None:
    """Raise TaskError for a file that is evidently something else."""
    for magic, what in FORMATS.items():
        if start.startswith(magic):
            raise TaskError(f"task.path: {path} is {what}; expected text with one JSON object per line")
    if b"\0" in start[:256]:
        raise TaskError(
            f"task.path: {path} is not text in UTF-8 (it contains zero bytes: a binary file, or UTF-16); "
            "expected text with one JSON object per line"
        )
    if line_content(start).startswith(b"["):
        raise TaskError(
            f"task.path: {path} starts with [: it is a JSON array; expected one JSON object per line, as in "
            f"jq -c '.[]' {path.name} > items.jsonl"
        )


def _build_item(
    index: int, record: dict[str, Any], prompt_field: str, answer_field: str, where: str
) -> TaskItem:
    for name, config_key in ((prompt_field, "task.prompt_field"), (answer_field, "task.answer_field")):
        if name not in record:
            present = ", ".join(sorted(record)) or "none"
            raise TaskError(f"{where}: field {name!r} ({config_key}) is missing; the object has: {present}")
    answer = record[answer_field]
    if not isinstance(answer, str | WrittenNumber):
        raise TaskError(f"{where}: field {answer_field!r} must be text or a number, got {json_name(answer)}")
    metadata = {
        key: plain_value(value, f"{where}: field {key!r}")
        for key, value in record.items()
        if key not in (prompt_field, answer_field)
    }
    return TaskItem(
        index=index,
        prompt=_read_prompt(record[prompt_field], prompt_field, where),
        answer=answer if isinstance(answer, str) else answer.text,
        metadata=metadata,
        source=where,
    )


def _read_prompt(value: Any, field: str, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value.strip():
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
            f"got {json_name(value)}"
        )
    roles = [message["role"] for message in value]
    for role in roles:
        if role in ROLES_ELSEWHERE:
            raise TaskError(
                f"{where}: field {field!r} has a message of role {role!r}; chat templates know it as "
                f"{ROLES_ELSEWHERE[role]!r}"
            )
    if roles[-1] == "assistant":
        raise TaskError(
            f"{where}: field {field!r} ends with a message of role 'assistant', which the model is to write: "
            "remove it from the prompt"
        )
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


TASK = TaskKind(JsonlConfig, JsonlTask)
