"""From item to token ids. Text is encoded here, once; everything after that works on ids."""

from __future__ import annotations

from typing import Any

from leeway.config.task import TaskConfig
from leeway.models.special import encode_text, without_double_bos
from leeway.tasks.base import Message, TaskError, TaskItem


def build_messages(item: TaskItem, config: TaskConfig) -> list[Message]:
    """The chat messages of an item: the system prompt and the item's own, the last one with the suffix."""
    if isinstance(item.prompt, str):
        own: list[Message] = [{"role": "user", "content": item.prompt}]
    else:
        own = list(item.prompt)
    if config.prompt_suffix:
        own[-1] = {**own[-1], "content": own[-1]["content"] + config.prompt_suffix}
    if config.system_prompt is None:
        return own
    return [{"role": "system", "content": config.system_prompt}, *own]


def encode_prompt(tokenizer: Any, item: TaskItem, config: TaskConfig) -> list[int]:
    """Token ids of an item's prompt.

    With a chat template: the template, applied once, with the generation prompt. Without one: the messages'
    texts, joined by line breaks, after BOS where the tokenizer adds one. BOS is there at most once, and
    nothing follows the text (`leeway.models.special`).
    """
    messages = build_messages(item, config)
    if tokenizer.chat_template:
        ids = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
    else:
        ids = encode_text(tokenizer, "\n".join(message["content"] for message in messages))
    if not ids:
        raise TaskError(f"item {item.index}: its prompt {item.prompt!r} encodes to no token")
    return without_double_bos(tokenizer, [int(token) for token in ids])
