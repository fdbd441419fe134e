"""The built-in digit-sorting task."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.tasks import TaskError, load_task, task_config


def digits(**fields):
    return load_task(task_config(kind="digits", **fields))


def test_item_is_a_pure_function_of_seed_and_index():
    first, second = digits(size=100, seed=3), digits(size=50, seed=3)
    second.item(7)  # reading order does not matter
    assert [first.item(i) for i in range(50)] == [second.item(i) for i in range(50)]
    assert [first.item(i).prompt for i in range(20)] != [digits(seed=4).item(i).prompt for i in range(20)]


def test_items_do_not_change_between_releases():
    # Runs are compared across versions: these are the items of seed 0.
    prompts = [digits(params={"length": 4}).item(i).prompt for i in range(3)]
    assert prompts == ["s:5558=", "s:2200=", "s:1960="]


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_answer_is_the_sorted_prompt(seed, length):
    item = digits(seed=seed, params={"length": length}, size=3).item(2)
    assert item.prompt[:2] == "s:"
    assert item.prompt[-1] == "="
    assert item.answer == "".join(sorted(item.prompt[2:-1]))
    assert len(item.answer) == length


def test_lengths_cover_the_range():
    task = digits(params={"min_length": 2, "max_length": 4}, size=200)
    assert {len(task.item(i).answer) for i in range(200)} == {2, 3, 4}


@pytest.mark.parametrize(
    ("response", "score"),
    [("1234", 1.0), (" 1234\n", 1.0), ("1243", 0.5), ("12", 0.5), ("12345", 0.8), ("", 0.0), ("abcd", 0.0)],
)
def test_verifier_counts_right_positions(response, score):
    task = digits(params={"length": 4}, reward="verifier")
    item = task.item(0)
    fixed = type(item)(index=0, prompt="s:3142=", answer="1234")
    assert task.verify(fixed, response) == pytest.approx(score)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"lenght": 3}, "lenght"),
        ({"length": 0}, "1 <= min_length"),
        ({"length": "4"}, "'4'"),
        ({"min_length": 6, "max_length": 5}, "6 to 5"),
    ],
)
def test_wrong_parameters_are_refused(params, message):
    with pytest.raises(TaskError, match=message):
        digits(params=params)


def test_index_out_of_range():
    with pytest.raises(IndexError, match="0 to 9, not 10"):
        digits(size=10).item(10)
