"""Reward functions and their checks at load."""

from fractions import Fraction

import pytest

from leeway.errors import EXIT_USAGE
from leeway.rewards import REWARDS, Reward, load_reward
from leeway.rewards.numbers import find_last_number
from leeway.rewards.worker import describe_error
from leeway.tasks import TaskError, TaskItem, load_task, task_config

ITEM = TaskItem(index=0, prompt="p", answer="1234")
DIGITS = load_task(task_config(kind="digits"))


def score(reward, item, response):
    return REWARDS[reward].score(item, response, DIGITS)


def load(**settings):
    config = task_config(**settings)
    return load_reward(config, load_task(config))


@pytest.mark.parametrize(("response", "value"), [("1234", 1.0), (" 1234\n", 1.0), ("1234.", 0.0), ("", 0.0)])
def test_exact(response, value):
    assert score("exact", ITEM, response) == value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 12.", 12),
        ("3 * 4 = 12", 12),
        ("10-5", 5),
        ("x = -5", -5),
        ("(-5)", -5),
        ("1,234 apples", 1234),
        ("1,23", 23),
        ("0.50", Fraction(1, 2)),
        ("**42**", 42),
        ("007", 7),
        ("no number", None),
        ("", None),
    ],
)
def test_find_last_number(text, number):
    found = find_last_number(text)
    assert (found and found.value) == number


def test_last_number_compares_values():
    assert score("last_number", TaskItem(0, "p", "12"), "It is 12.0") == 1.0
    assert score("last_number", TaskItem(0, "p", "1200"), "so 1,200!") == 1.0
    assert score("last_number", TaskItem(0, "p", "12"), "12 or 13") == 0.0
    assert score("last_number", TaskItem(0, "p", "12"), "I do not know") == 0.0
    with pytest.raises(ValueError, match="item 7, 'twelve', is not a number"):
        score("last_number", TaskItem(7, "p", "twelve"), "12")


def test_verifier_is_the_tasks_own():
    assert score("verifier", ITEM, "1243") == DIGITS.verify(ITEM, "1243") == 0.5


def test_function_gets_response_answer_and_metadata(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def brevity(response, answer, metadata):\n"
        "    return metadata['weight'] * (response == answer) / len(response)\n"
    )
    monkeypatch.chdir(tmp_path)
    reward = load(kind="digits", reward="my_rewards:brevity")
    assert reward(TaskItem(0, "p", "abcd", {"weight": 2}), "abcd") == 0.5


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            "exakt",
            "unknown reward 'exakt'; did you mean 'exact'. available: exact, last_number, verifier, "
            "or module:function",
        ),
        ("no_such_module:f", "module 'no_such_module' cannot be imported"),
        ("math:no_such", "math has nothing named 'no_such'"),
        ("math:pi", "math has float named 'pi'"),
        (":f", "cannot be imported"),
        ("no_such.py:f", r"cannot be imported.*did you mean no_such:f\?"),
        ("./here/no_such.py:f", r"did you mean here\.no_such:f\?"),
        ("here/no_such:f", r"did you mean here\.no_such:f\?"),
        ("no_such.f", r"unknown reward 'no_such\.f'.*did you mean no_such:f\?"),
        ("math:sqrt", "'x' is positional-only"),
    ],
)
def test_unusable_rewards_are_refused_at_load(reward, message):
    with pytest.raises(TaskError, match=message) as caught:
        load(kind="digits", reward=reward)
    assert caught.value.exit_code == EXIT_USAGE
    assert isinstance(caught.value, ValueError)


def test_last_number_needs_numeric_answers(tmp_path):
    file = tmp_path / "items.jsonl"
    file.write_text('{"prompt": "x", "answer": "blue"}\n')
    with pytest.raises(TaskError, match=r"answer of item 0 of task .* is 'blue'"):
        load(kind="jsonl", path=str(file), reward="last_number")
    file.write_text('{"prompt": "x", "answer": "1"}\n{"prompt": "x", "answer": "two"}\n')
    with pytest.raises(TaskError, match=r"answer of item 1 of task .* is 'two'"):  # every line is checked
        load(kind="jsonl", path=str(file), reward="last_number")


def test_only_the_first_item_of_a_generated_task_is_checked(monkeypatch):
    checked = []
    monkeypatch.setitem(
        REWARDS._loaded, "exact", Reward(lambda *_: 0.0, lambda item, task: checked.append(item.index))
    )
    load(kind="digits", reward="exact")
    assert checked == [0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            Reward(lambda item, response: 0.0),
            "task.reward: exact: score.*cannot be called with .item, response, task.",
        ),
        (
            Reward(lambda *_: 0.0, lambda item: None),
            "task.reward: exact: check.*cannot be called with .item, task.",
        ),
    ],
)
def test_the_functions_of_an_installed_reward_are_checked(monkeypatch, reward, message):
    monkeypatch.setitem(REWARDS._loaded, "exact", reward)
    with pytest.raises(TaskError, match=message):
        load(kind="digits", reward="exact")


def test_an_error_with_a_lone_surrogate_can_be_sent_on():
    text = describe_error(ValueError("\ud800 in a file name"))
    assert text == r"the reward function raised ValueError: \ud800 in a file name" and text.encode()
