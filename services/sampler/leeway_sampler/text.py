"""Token ids to text. Only rewards read the text: the trainer gets the token ids as they were drawn."""

from __future__ import annotations

from collections.abc import Callable

from leeway.errors import UsageError
from leeway.models.tokenizer import load_tokenizer


def text_decoder(model: str, trust_remote_code: bool) -> Callable[[list[int]], str]:
    """A function from response ids to text without special tokens.

    `model`: directory or hub id. Raises UsageError when it has no usable tokenizer.
    """
    try:
        tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as exc:
        raise UsageError(f"model {model} has no usable tokenizer: {exc}") from exc
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
