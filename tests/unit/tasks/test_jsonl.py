"""JSONL tasks: every unusable line is named."""

import json

import pytest

from leeway.rewards import load_reward
from leeway.tasks import TaskError, load_task, task_config


def load(path, **fields):
    return load_task(task_config(kind="jsonl", path=str(path), **fields))


def test_reads_prompts_answers_and_metadata(tmp_path):
    file = tmp_path / "items.jsonl"
    chat = [{"role": "system", "content": "Count."}, {"role": "user", "content": "one two"}]
    lines = [{"q": "2+2?", "a": 4, "level": 1}, {"q": chat, "a": "two"}]
    file.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    task = load(file, prompt_field="q", answer_field="a")
    assert len(task) == 2
    assert (task.item(0).prompt, task.item(0).answer, task.item(0).metadata) == ("2+2?", "4", {"level": 1})
    assert task.item(1).prompt == tuple(chat)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", "answer": "y"', "line 2: not JSON"),
        ('["x", "y"]', "line 2: expected a JSON object, got a list"),
        ('{"prompt": "x", "anwser": "y"}', "line 2: field 'answer' .task.answer_field. is missing.*anwser"),
        ('{"prompt": "", "answer": "y"}', "line 2: field 'prompt' is empty"),
        ('{"prompt": 3, "answer": "y"}', "line 2: field 'prompt' must be text or a list"),
        ('{"prompt": "  \\n", "answer": "y"}', "line 2: field 'prompt' is empty"),
        ('{"prompt": [{"role": "user"}], "answer": "y"}', "line 2: field 'prompt' must be"),
        (
            '{"prompt": [{"role": "human", "content": "x"}], "answer": "y"}',
            "line 2: .* role 'human'; chat templates know it as 'user'",
        ),
        (
            '{"prompt": [{"role": "assistant", "content": "x"}], "answer": "y"}',
            "line 2: .* ends with a message of role 'assistant'",
        ),
        ('{"prompt": "x", "answer": null}', "line 2: field 'answer' must be text or a number, got null"),
        ('{"prompt": "x", "answer": true}', "line 2: field 'answer' must be"),
    ],
)
def test_unreadable_line_is_named(tmp_path, line, message):
    file = tmp_path / "items.jsonl"
    file.write_text('{"prompt": "x", "answer": "y"}\n' + line + "\n")
    with pytest.raises(TaskError, match=message):
        load(file)


def test_not_utf8(tmp_path):
    file = tmp_path / "items.jsonl"
    file.write_bytes(b'{"prompt": "x", "answer": "y"}\n{"prompt": "\xff", "answer": "y"}\n')
    with pytest.raises(TaskError, match="line 2: not UTF-8"):
        load(file)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32-le"])
def test_other_encodings_are_named(tmp_path, encoding):
    file = tmp_path / "items.jsonl"
    file.write_bytes('{"prompt": "x", "answer": "y"}\n'.encode(encoding))
    with pytest.raises(TaskError, match="is UTF-16 text|not text in UTF-8"):
        load(file)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file_is_refused(tmp_path, content):
    file = tmp_path / "items.jsonl"
    file.write_text(content)
    with pytest.raises(TaskError, match="has no items"):
        load(file)


def test_missing_file(tmp_path):
    with pytest.raises(TaskError, match=r"nowhere\.jsonl is not a file"):
        load(tmp_path / "nowhere.jsonl")


def test_a_path_that_is_too_long_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"task\.path: .* cannot be read: File name too long"):
        load(tmp_path / ("x" * 300))


def test_verifier_does_not_exist(tmp_path):
    file = tmp_path / "items.jsonl"
    file.write_text('{"prompt": "x", "answer": "y"}\n')
    config = task_config(kind="jsonl", path=str(file), reward="verifier")
    with pytest.raises(TaskError, match="has none"):
        load_reward(config, load_task(config))
