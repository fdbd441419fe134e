"""Token ids without a row in the embedding are named: tokenizer, lists of stop tokens, pad, prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leeway.models.base import ModelError
from leeway.models.tokens import check_ids, check_tokens, token_problems
from leeway_host.models.tiny import build_tokenizer

ROWS = 128


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(ROWS)


CASES = [
    # config.json, generation_config.json, words of the problem
    ({}, {}, None),
    ({"eos_token_id": 127, "pad_token_id": 0}, {"eos_token_id": [1, 127]}, None),
    ({"eos_token_id": None, "pad_token_id": -1}, {}, None),
    ({"eos_token_id": 128}, {}, "config.json: eos_token_id is 128, but the embedding has 128 rows"),
    ({"eos_token_id": [1, 4000]}, {}, "config.json: eos_token_id is 4000"),
    ({}, {"eos_token_id": [1, 128]}, "generation_config.json: eos_token_id is 128"),
    ({"pad_token_id": 32000}, {}, "config.json: pad_token_id is 32000"),
    ({"bos_token_id": -1}, {}, "config.json: bos_token_id is -1"),
    ({"eos_token_id": "<eos>"}, {}, "eos_token_id is '<eos>', expected a token id"),
    ({"eos_token_id": 1.5}, {}, "eos_token_id is 1.5, expected a token id"),
    ({"text_config": {"eos_token_id": 500}}, {}, "config.json: eos_token_id is 500"),
    ({}, {"forced_eos_token_id": 300}, "forced_eos_token_id is 300"),
]


@pytest.mark.parametrize(("config", "generation", "words"), CASES)
def test_ids_in_the_configuration(
    tokenizer: Any, config: dict[str, Any], generation: dict[str, Any], words: str | None
) -> None:
    problems = token_problems(tokenizer, config, generation, ROWS)
    assert problems == [] if words is None else words in problems[0]


def test_a_tokenizer_with_more_tokens_than_rows(tmp_path: Path) -> None:
    bigger = build_tokenizer(ROWS)
    bigger.add_tokens([f"<x{i}>" for i in range(60)])
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": ROWS}))
    words = (
        r"tokenizer has 188 tokens, the embedding 128 rows \(ids 0 to 127\): '<x0>' has id 128, '<x1>' has "
        r"id 129, '<x2>' has id 130 and 57 more"
    )
    with pytest.raises(ModelError, match=words):
        check_tokens(tmp_path, bigger)


def test_a_tokenizer_with_fewer_tokens_is_normal(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 160}))
    check_tokens(tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("ids", "rows", "bad"), [([1, 127], 128, None), ([1, 127], 100, 127), ([5], None, None)]
)
def test_ids_of_a_prompt(tokenizer: Any, ids: list[int], rows: int | None, bad: int | None) -> None:
    if bad is None:
        check_ids(ids, rows, tokenizer, "item 3 of the data set")
        return
    with pytest.raises(ModelError, match=rf"item 3 of the data set: token .* has id {bad}, .* {rows} rows"):
        check_ids(ids, rows, tokenizer, "item 3 of the data set")
