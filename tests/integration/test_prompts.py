"""Prompts that cannot be generated from are refused before the run starts, with the item's index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from leeway.config import RunConfig
from leeway.config.load import build_config
from leeway.errors import EXIT_USAGE
from leeway_controller.plan import PromptError
from leeway_controller.prompts import check_prompts, prompt_encoder

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('no narrator here') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tokenizer with one token per letter and a chat template that does not take everyone."""
    vocabulary = {"<unk>": 0, **{letter: number for number, letter in enumerate("abcdefgh", start=1)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def config(tmp_path: Path, prompts: list[object], steps: int = 2) -> RunConfig:
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": "x"}) + "\n" for p in prompts))
    return build_config(
        {
            "task": {"kind": "jsonl", "path": str(path)},
            "model": {"max_length": 16},
            "sampling": {"max_new_tokens": 8},
            "batch": {"prompts": 2, "group_size": 2},
            "trainer": {"steps": steps},
        }
    )


def chat(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def test_good_prompts_pass_and_only_what_is_used_is_looked_at(model: Path, tmp_path: Path) -> None:
    given = config(tmp_path, [chat("user", "abc")] * 3 + ["ab", "c"], steps=1)
    assert check_prompts(given, *prompt_encoder(given, str(model))) == 2


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (chat("user", "abcdefgha"), "the prompt has 9 tokens; with sampling.max_new_tokens=8"),
        (chat("user", ""), "encodes to no token"),
        (chat("narrator", "abc"), "its prompt cannot be encoded: .*no narrator here"),
    ],
)
def test_bad_prompts_are_refused_with_their_index(
    model: Path, tmp_path: Path, bad: object, words: str
) -> None:
    given = config(tmp_path, [chat("user", "abc"), chat("user", "ab"), bad, chat("user", "a")])
    with pytest.raises(Exception, match=f"item 2.*{words}") as caught:
        check_prompts(given, *prompt_encoder(given, str(model)))
    assert caught.value.exit_code == EXIT_USAGE  # type: ignore[attr-defined]


def test_the_error_is_a_prompt_error(model: Path, tmp_path: Path) -> None:
    given = config(tmp_path, [chat("narrator", "abc")] * 4)
    with pytest.raises(PromptError):
        check_prompts(given, *prompt_encoder(given, str(model)))
