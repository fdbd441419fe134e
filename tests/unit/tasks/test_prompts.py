"""Encoding prompts: the chat template is applied once, in ids."""

import pytest

from leeway.tasks import TaskError, TaskItem, build_messages, encode_prompt, task_config

DIGITS = task_config(kind="digits")
CHAT = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "?"},
    {"role": "user", "content": "1"},
)


class PlainTokenizer:
    chat_template = None

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]


class ChatTokenizer(PlainTokenizer):
    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, return_dict):
        assert tokenize
        assert add_generation_prompt
        assert not return_dict
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


def test_messages_get_system_prompt_and_suffix():
    config = DIGITS.model_copy(update={"system_prompt": "Be brief.", "prompt_suffix": " Answer:"})
    assert build_messages(TaskItem(0, "1+1?", "2"), config) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1? Answer:"},
    ]
    assert build_messages(TaskItem(0, CHAT, "2"), config)[-1] == {"role": "user", "content": "1 Answer:"}
    assert CHAT[-1]["content"] == "1"


def test_chat_template_is_used_when_there_is_one():
    ids = encode_prompt(ChatTokenizer(), TaskItem(0, "1+1?", "2"), DIGITS)
    assert "".join(map(chr, ids)) == "<user>1+1?<assistant>"


def test_plain_encoding_without_template():
    ids = encode_prompt(PlainTokenizer(), TaskItem(0, "s:21=", "12"), DIGITS)
    assert "".join(map(chr, ids)) == "s:21="
    ids = encode_prompt(PlainTokenizer(), TaskItem(0, CHAT, "2"), DIGITS)
    assert "".join(map(chr, ids)) == "Hi\n?\n1"


def test_empty_encoding_is_refused():
    with pytest.raises(TaskError, match="item 4"):
        encode_prompt(PlainTokenizer(), TaskItem(4, "", "2"), DIGITS)
