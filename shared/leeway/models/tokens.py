"""Token ids against the rows of the embedding: an id beyond the last row kills the engine and the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from leeway.models.base import (
    CONFIG,
    GENERATION_CONFIG,
    ModelError,
    embedding_rows,
    first_few,
    read_json,
    text_config,
)

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
FORCED = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")


def token_problems(
    tokenizer: Any, config: Mapping[str, Any], generation: Mapping[str, Any], rows: int
) -> list[str]:
    """Ids that have no row in an embedding of `rows` rows: of the tokenizer's tokens, of special tokens in
    config.json and generation_config.json, and of the tokenizer's own special tokens.
    """
    problems = []
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= rows)
    if beyond:
        named = first_few([f"{token!r} has id {number}" for number, token in beyond], 3)
        problems.append(
            f"the tokenizer has {len(tokenizer)} tokens, the embedding {rows} rows (ids 0 to {rows - 1}): "
            f"{named}"
        )
    for where, values in ((CONFIG, text_config(config)), (CONFIG, config), (GENERATION_CONFIG, generation)):
        for key in (*SPECIAL, *FORCED):
            problems += _id_problems(f"{where}: {key}", values.get(key), rows)
    for key in SPECIAL:
        problems += _id_problems(f"the tokenizer's {key}", getattr(tokenizer, key, None), rows)
    return list(dict.fromkeys(problems))


def _id_problems(where: str, value: Any, rows: int) -> list[str]:
    problems = []
    for number in value if isinstance(value, list) else [value]:
        if number is None or (number == -1 and "pad" in where):  # -1: older Llama configurations have no pad
            continue
        if not isinstance(number, int) or isinstance(number, bool):
            problems.append(f"{where} is {value!r}, expected a token id or a list of them")
        elif not 0 <= number < rows:
            problems.append(f"{where} is {number}, but the embedding has {rows} rows (ids 0 to {rows - 1})")
    return problems


def check_tokens(directory: Path, tokenizer: Any) -> None:
    """Raise ModelError for token ids of a model directory that have no row in its embedding.

    `tokenizer`: its tokenizer, loaded.
    """
    config = read_json(directory / CONFIG)
    rows = embedding_rows(config)
    if rows is None:
        return
    problems = token_problems(tokenizer, config, read_json(directory / GENERATION_CONFIG), rows)
    if problems:
        raise ModelError(
            f"model {directory}: {'; '.join(problems)}. Resize the embedding "
            "(model.resize_token_embeddings), or use the tokenizer that belongs to the weights"
        )


def check_ids(ids: Iterable[int], rows: int | None, tokenizer: Any, what: str) -> None:
    """Raise ModelError if one of `ids` has no row in the embedding. `what`: whose ids they are."""
    if rows is None:
        return
    for number in ids:
        if not 0 <= number < rows:
            token = tokenizer.convert_ids_to_tokens(number)
            raise ModelError(
                f"{what}: token {token!r} has id {number}, but the embedding has {rows} rows (ids 0 to "
                f"{rows - 1}), and the tokenizer {len(tokenizer)} tokens"
            )
