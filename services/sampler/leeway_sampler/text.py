"""Token ids to text, for the reward alone: text never goes back to the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leeway.errors import UsageError


def text_decoder(model: str, trust_remote_code: bool) -> Callable[[list[int]], str]:
    """The function that turns response ids into text, without special tokens. Raises UsageError."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as exc:
        raise UsageError(f"model {model} has no usable tokenizer: {exc}") from exc
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
