"""`python -m leeway_host.preflight.prompts`: prompts through tokenizer and chat template.

The first item, and the longest of a sample: its length against model.max_length, its ids against the
vocabulary, special tokens that a tokenizer adds by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leeway.config import RunConfig
from leeway.errors import LeewayError
from leeway.findings import Finding, run_trial
from leeway.models.base import CONFIG, embedding_rows, read_json
from leeway.models.special import special_token_notes
from leeway.models.templates import ignored_messages
from leeway.models.tokenizer import load_tokenizer
from leeway.models.tokens import check_tokens
from leeway.tasks import Task, build_messages, encode_prompt, load_task
from leeway.tasks.base import Message

CHECK = "prompts"
SAMPLE = 200
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def try_prompts(config: RunConfig, model: str) -> Iterator[Finding | str]:
    """Load the tokenizer and the task, encode a sample of prompts."""
    yield "loading the tokenizer"
    try:
        tokenizer = load_tokenizer(
            model, trust_remote_code=config.model.trust_remote_code, local_files_only=True
        )
    except Exception as exc:  # noqa: BLE001 (libraries raise many types, also from a model's own code)
        text = f"the tokenizer in {model} cannot be loaded: {type(exc).__name__}: {exc}"
        yield Finding("error", CHECK, text, "use a directory with a complete tokenizer")
        return
    yield "loading the task"
    task = load_task(config.task)
    yield "encoding prompts"
    yield from check_prompts(config, tokenizer, task, embedding_rows(read_json(Path(model) / CONFIG)))
    yield from judge_template_files(Path(model), tokenizer)
    check_tokens(Path(model), tokenizer)


def sample_items(size: int) -> list[int]:
    """The first item, the last, and others at equal distances; at most SAMPLE."""
    count = min(size, SAMPLE)
    return sorted({round(i * (size - 1) / max(1, count - 1)) for i in range(count)})


def check_prompts(config: RunConfig, tokenizer: Any, task: Task, vocabulary: int | None) -> Iterator[Finding]:
    """Findings about a sample of the task's prompts, and about the tokenizer's special tokens."""
    encoded: dict[int, list[int]] = {}
    for index in sample_items(len(task)):
        try:
            encoded[index] = encode_prompt(tokenizer, task.item(index), config.task)
        except LeewayError:
            raise
        except Exception as exc:  # noqa: BLE001 (whatever a chat template or a tokenizer raises)
            text = f"item {index}: its prompt cannot be encoded: {type(exc).__name__}: {exc}"
            yield Finding("error", CHECK, text, "correct the item, or the model's chat template")
            return
    longest = max(encoded, key=lambda index: len(encoded[index]))
    problems = [
        *judge_length(config, longest, len(encoded[longest])),
        *judge_ids(tokenizer, encoded, vocabulary),
        *judge_template(config, tokenizer, task, list(encoded)),
        *judge_special_tokens(tokenizer),
    ]
    yield from problems
    if not any(problem.level == "error" for problem in problems):
        kind = "chat template" if tokenizer.chat_template else "plain text"
        text = (
            f"{len(encoded)} of {len(task)} prompts encoded ({kind}); the longest, item {longest}, has "
            f"{len(encoded[longest])} tokens of model.max_length={config.model.max_length}"
        )
        yield Finding("ok", CHECK, text)


def judge_length(config: RunConfig, item: int, tokens: int) -> list[Finding]:
    new, limit = config.sampling.max_new_tokens, config.model.max_length
    if tokens + new <= limit:
        return []
    text = f"item {item}: {tokens} tokens + sampling.max_new_tokens={new} exceed model.max_length={limit}"
    return [Finding("error", CHECK, text, f"set model.max_length to {tokens + new} or more")]


def judge_ids(tokenizer: Any, encoded: dict[int, list[int]], vocabulary: int | None) -> list[Finding]:
    """Ids of prompts must have a row in the embedding; check_tokens looks at all other tokens."""
    if vocabulary is None:
        return []
    step = "use the tokenizer that belongs to the model, or enlarge its embedding"
    for item, ids in encoded.items():
        worst = max(ids)
        if worst >= vocabulary:
            token = tokenizer.convert_ids_to_tokens(worst)
            text = (
                f"item {item}: token {token!r} has id {worst}, the model's embedding has {vocabulary} rows "
                f"(the tokenizer has {len(tokenizer)} tokens)"
            )
            return [Finding("error", CHECK, text, step)]
    return []


def judge_template(config: RunConfig, tokenizer: Any, task: Task, items: list[int]) -> list[Finding]:
    """Every message must be part of the prompt; one chat of each sequence of roles is tried."""
    if not tokenizer.chat_template:
        return []
    chats: dict[tuple[str, ...], tuple[int, list[Message]]] = {}
    for item in items:
        chat = build_messages(task.item(item), config.task)
        chats.setdefault(tuple(message["role"] for message in chat), (item, chat))
    found = []
    for item, chat in chats.values():
        for place in ignored_messages(tokenizer, chat):
            role, content = chat[place]["role"], chat[place]["content"]
            if not content.strip():
                continue
            text = f"item {item}: the chat template drops the message of role {role!r}, {content[:60]!r}"
            step = "use a role and content that the template knows, or correct the template"
            if role == "system" and config.task.system_prompt is not None:
                step = "remove task.system_prompt, or correct the template"
            found.append(Finding("error", CHECK, text, step))
    return found


def judge_template_files(model: Path, tokenizer: Any) -> list[Finding]:
    """A file with a chat template that the tokenizer does not use: it is empty, or a processor's."""
    unused = [name for name in TEMPLATE_FILES if (model / name).is_file() and not tokenizer.chat_template]
    return [
        Finding(
            "warning",
            CHECK,
            f"the tokenizer has no chat template, although there is {name}: prompts are plain text",
            "put the template into chat_template.jinja, or delete the file",
        )
        for name in unused
    ]


def judge_special_tokens(tokenizer: Any) -> list[Finding]:
    """Where prompts differ from the tokenizer's own way, and whether responses can end."""
    found = [Finding("warning", CHECK, note) for note in special_token_notes(tokenizer)]
    if getattr(tokenizer, "eos_token_id", None) is None:
        text = "the tokenizer has no end token: every response has sampling.max_new_tokens tokens"
        found.append(Finding("warning", CHECK, text, "set eos_token in tokenizer_config.json"))
    return found


if __name__ == "__main__":
    run_trial(CHECK, try_prompts)
