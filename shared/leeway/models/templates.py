"""Chat templates, tried on short chats: what they drop, and whether they ask for a reply.

Templates do not fail for what they do not know. A role that they do not handle, content in another form than
they expect or a variable that is not passed leaves nothing, and the prompt lacks the question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MARK = "LeewayProbe"
"""Text that no template contains."""
Chat = Sequence[Mapping[str, str]]


def render(tokenizer: Any, chat: Chat, *, tokenize: bool = False, reply: bool = True) -> Any:
    """A chat as text, or as token ids; `reply`: with the beginning of the model's turn."""
    options = {"return_dict": False} if tokenize else {}
    return tokenizer.apply_chat_template(
        [dict(message) for message in chat], tokenize=tokenize, add_generation_prompt=reply, **options
    )


def probe_chat(tokenizer: Any, text: str) -> Chat | None:
    """The shortest chat with `text` that the template accepts; None if it refuses all that are tried."""
    user = {"role": "user", "content": text}
    for chat in ([user], [{"role": "system", "content": text}, user]):
        try:
            render(tokenizer, chat)
        except Exception:  # noqa: BLE001 (templates raise whatever they like)
            continue
        return chat
    return None


def without_reply(tokenizer: Any) -> str:
    """What follows the last message if the template ignores add_generation_prompt; otherwise empty."""
    chat = probe_chat(tokenizer, MARK)
    if chat is None:
        return ""
    text = render(tokenizer, chat)
    return str(text.rpartition(MARK)[2]) if text == render(tokenizer, chat, reply=False) else ""


def ignored_messages(tokenizer: Any, chat: Chat) -> list[int]:
    """Positions of the messages in `chat` whose content does not change what the template makes of it."""
    whole = render(tokenizer, chat)
    found = []
    for place, message in enumerate(chat):
        changed = [*chat]
        changed[place] = {**message, "content": f"{message['content']} {MARK}"}
        try:
            if render(tokenizer, changed) == whole:
                found.append(place)
        except Exception:  # noqa: BLE001 (it read the content, and refuses this one)
            continue
    return found
