"""Special tokens that a tokenizer adds by itself, and what prompts do with them.

A prompt begins with BOS at most once and never gets an EOS that its text does not contain: a model that reads
EOS at the end of its prompt answers something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from leeway.models.templates import probe_chat, render, without_reply

PROBES = ("1", "a", "Hello world")


@lru_cache(maxsize=8)
def own_special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids that the tokenizer puts before a text by itself, ids that it appends).

    Found by encoding a short text with and without special tokens, once for each tokenizer.
    """
    for probe in PROBES:
        plain = [int(i) for i in tokenizer.encode(probe, add_special_tokens=False)]
        own = [int(i) for i in tokenizer.encode(probe)]
        at = _find(own, plain)
        if plain and at is not None:
            return tuple(own[:at]), tuple(own[at + len(plain) :])
    return (), ()


def _find(whole: Sequence[int], part: Sequence[int]) -> int | None:
    places = range(len(whole) - len(part) + 1)
    return next((at for at in places if list(whole[at : at + len(part)]) == list(part)), None)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of plain text: what the tokenizer puts first by itself (BOS), at most once, and nothing after
    the text.
    """
    ids = [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    first, _ = own_special_tokens(tokenizer)
    return without_double_bos(tokenizer, ids if tuple(ids[: len(first)]) == first else [*first, *ids])


def without_double_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    """`ids` with one BOS at the beginning where there are several."""
    bos = getattr(tokenizer, "bos_token_id", None)
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


def special_token_notes(tokenizer: Any) -> list[str]:
    """Where the prompts of a run differ from what the tokenizer would do by itself, a sentence each."""
    first, last = own_special_tokens(tokenizer)
    names = tokenizer.convert_ids_to_tokens
    if not tokenizer.chat_template:
        if not last:
            return []
        return [
            f"the tokenizer appends {_quoted(names(last))} to every text; prompts are encoded without it, so "
            "that the model continues them"
        ]
    chat = probe_chat(tokenizer, PROBES[0])
    if chat is None:
        return []  # the template refuses every chat that is tried here; the prompts of the run are tried too
    ids = [int(i) for i in render(tokenizer, chat, tokenize=True)]
    notes = []
    bos, eos = getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "eos_token_id", None)
    if without_double_bos(tokenizer, ids) != ids:
        notes.append(f"the chat template begins with {names(bos)!r} twice; prompts have it once")
    if bos is not None and bos in first and bos not in ids:
        notes.append(
            f"the tokenizer begins every text with {names(bos)!r}, the chat template does not: prompts "
            "follow the template"
        )
    if eos is not None and (ids[-1:] == [eos] or names(eos) in without_reply(tokenizer)):
        notes.append(
            f"the chat template ends a prompt with {names(eos)!r}, the token that ends a response: it may "
            "ignore add_generation_prompt"
        )
    return notes


def _quoted(tokens: Sequence[str]) -> str:
    return ", ".join(repr(token) for token in tokens)
