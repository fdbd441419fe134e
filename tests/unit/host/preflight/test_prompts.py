"""Prompts through real tokenizers: too long, outside the vocabulary, with special tokens of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from preflight_support import config_of, levels, text_of
from tokenizers import processors

from leeway.tasks import load_task
from leeway_host.models.tiny import build_tokenizer
from leeway_host.preflight.prompts import check_prompts, judge_template_files, sample_items


@pytest.fixture
def tokenizer() -> Any:
    return build_tokenizer(128)


def lines(path: Path, *prompts: str) -> dict[str, Any]:
    """A JSONL task with these prompts."""
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in prompts))
    return {"kind": "jsonl", "path": str(path)}


def check(tokenizer: Any, task: dict[str, Any] | None = None, **sections: Any) -> list[Any]:
    config = config_of(**({"task": task} if task else {}), **sections)
    return list(check_prompts(config, tokenizer, load_task(config.task), 128))


def test_good_prompts(tokenizer: Any) -> None:
    found = check(tokenizer)
    assert levels(found) == {"ok"} and "plain text" in text_of(found)


def test_the_longest_prompt_counts(tokenizer: Any, tmp_path: Path) -> None:
    task = lines(tmp_path / "a.jsonl", "1", "2", "x" * 50, "3")
    sections = {"model": {"max_length": 60}, "sampling": {"max_new_tokens": 20}}
    found = check(tokenizer, task, **sections)
    assert levels(found) == {"error"}
    assert "item 2: 50 tokens + sampling.max_new_tokens=20 exceed model.max_length=60" in text_of(found)
    assert "70 or more" in text_of(found)


def test_a_token_without_a_row_in_the_embedding(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.add_tokens(["<x1>", "<x2>"])
    found = check(tokenizer, lines(tmp_path / "a.jsonl", "1", "say <x2>"))
    assert levels(found) == {"error"}
    assert "item 1: token '<x2>' has id 129, the model's embedding has 128 rows" in text_of(found)
    assert "(the tokenizer has 130 tokens)" in text_of(found)


def test_a_tokenizer_that_ends_every_prompt(tokenizer: Any) -> None:
    inner = tokenizer.backend_tokenizer
    inner.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    assert tokenizer.encode("1")[-1] == 1, "the tokenizer does not append: the test shows nothing"
    found = check(tokenizer)
    assert levels(found) == {"warning", "ok"} and "appends '<eos>'" in text_of(found), text_of(found)


def test_no_end_token(tokenizer: Any) -> None:
    tokenizer.eos_token = None
    assert "no end token" in text_of(check(tokenizer))


def test_a_broken_chat_template(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('system role not supported') }}"
    found = check(tokenizer)
    assert levels(found) == {"error"}
    assert "item 0" in text_of(found) and "system role not supported" in text_of(found)


ANY = "{% for m in messages %}{{ m.content }}{% endfor %}:"
KNOWN = "{% for m in messages if m.role in ('user', 'system') %}{{ m.content | trim }} {% endfor %}:"
USER = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}:"
PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}:"
NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + ANY


@pytest.mark.parametrize(
    ("template", "roles", "system", "dropped"),
    [
        (ANY, ["user"], None, None),
        (ANY, ["critic"], "7", None),
        (KNOWN, ["system", "user"], None, None),
        (KNOWN, ["tool", "user"], None, "'tool', '0'"),
        (USER, ["user"], "7", "'system', '7'"),
        (PARTS, ["user"], None, "'user', '0'"),
        ("{{ conversation }}:", ["user"], None, "'user', '0'"),
        (NEEDS_SYSTEM, ["user"], "7", None),
    ],
)
def test_what_a_chat_template_drops(
    tokenizer: Any, tmp_path: Path, template: str, roles: list[str], system: str | None, dropped: str | None
) -> None:
    tokenizer.chat_template = template
    messages = [{"role": role, "content": str(place)} for place, role in enumerate(roles)]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": messages, "answer": "1"}))
    found = check(tokenizer, {"kind": "jsonl", "path": str(tmp_path / "a.jsonl"), "system_prompt": system})
    assert levels(found) == ({"error"} if dropped else {"ok"}), text_of(found)
    assert dropped is None or f"item 0: the chat template drops the message of role {dropped}" in text_of(
        found
    )


@pytest.mark.parametrize(
    ("file", "template", "told"),
    [
        ("chat_template.json", None, True),
        ("chat_template.jinja", "", True),
        ("chat_template.json", ANY, False),
        ("config.json", None, False),
    ],
)
def test_a_template_that_the_tokenizer_does_not_use(
    tokenizer: Any, tmp_path: Path, file: str, template: str | None, told: bool
) -> None:
    tokenizer.chat_template = template
    (tmp_path / file).write_text("")
    found = judge_template_files(tmp_path, tokenizer)
    assert [file in finding.text for finding in found] == [True] * told


@pytest.mark.parametrize("size", [1, 2, 199, 200, 201, 5000])
def test_the_sample(size: int) -> None:
    items = sample_items(size)
    assert items[0] == 0 and items[-1] == size - 1 and len(items) == min(size, 200)
