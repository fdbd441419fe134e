"""Special tokens in prompts: BOS at most once, nothing after the text, and what differs is reported."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from leeway.models.special import own_special_tokens, special_token_notes
from leeway.tasks import TaskItem, encode_prompt, task_config

DIGITS = task_config(kind="digits")
BOS, EOS = 1, 2
TURN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ONE, TWO = 4, 5
"""Ids of the texts 1 and 2."""


def tokenizer(first: str = "", last: str = "", template: str | None = None, bos: str = "<s>") -> Any:
    """One token per character; the post-processor puts `first` before every text and `last` after it."""
    vocabulary = {"<unk>": 0, "<s>": BOS, "</s>": EOS, "a": 3, "1": ONE, "2": TWO}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if first or last:
        inner.post_processor = processors.TemplateProcessing(
            single=" ".join(part for part in (first, "$A", last) if part),
            special_tokens=[("<s>", BOS), ("</s>", EOS)],
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token=bos, eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = template
    return fast


CASES = [
    # post-processor, chat template, text -> ids, words of the note
    ({}, "12", [ONE, TWO], None),
    ({"first": "<s>"}, "12", [BOS, ONE, TWO], None),
    ({"last": "</s>"}, "12", [ONE, TWO], "appends '</s>' to every text"),
    ({"first": "<s>", "last": "</s>"}, "12", [BOS, ONE, TWO], "appends '</s>'"),
    ({"first": "<s>"}, "<s>12", [BOS, ONE, TWO], None),  # the text has it already
    ({"first": "</s>", "bos": "</s>"}, "12", [EOS, ONE, TWO], None),  # OPT: BOS is EOS
    ({"template": TURN}, "12", [ONE, TWO], None),
    ({"first": "<s>", "template": TURN}, "12", [ONE, TWO], "the chat template does not"),
    ({"first": "<s>", "template": "<s>" + TURN}, "12", [BOS, ONE, TWO], None),
    ({"first": "<s>", "template": "<s><s>" + TURN}, "12", [BOS, ONE, TWO], "'<s>' twice"),
    ({"first": "<s>", "last": "</s>", "template": "<s>" + TURN}, "12", [BOS, ONE, TWO], None),
    ({"template": TURN + "</s>"}, "12", [ONE, TWO, EOS], "ends a prompt with '</s>'"),
    ({"template": TURN + "</s>a"}, "12", [ONE, TWO, EOS, 3], "ends a prompt with '</s>'"),
    ({"template": TURN + "</s>{% if add_generation_prompt %}a{% endif %}"}, "12", [ONE, TWO, EOS, 3], None),
    # a template that wants exactly the chats of this run
    (
        {"template": "{% if '2' not in messages[0].content %}{{ raise_exception('no') }}{% endif %}" + TURN},
        "12",
        [ONE, TWO],
        None,
    ),
]


@pytest.mark.parametrize(("made", "text", "ids", "note"), CASES)
def test_prompts(made: dict[str, str], text: str, ids: list[int], note: str | None) -> None:
    given = tokenizer(**made)
    assert encode_prompt(given, TaskItem(0, text, "1"), DIGITS) == ids
    notes = special_token_notes(given)
    assert notes == [] if note is None else note in notes[0]


def test_own_special_tokens() -> None:
    assert own_special_tokens(tokenizer()) == ((), ())
    assert own_special_tokens(tokenizer(first="<s>", last="</s>")) == ((BOS,), (EOS,))
