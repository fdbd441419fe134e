"""reasoning-gym tasks."""

import pytest

from leeway.tasks import TaskError, load_task, task_config


def load(name, **fields):
    return load_task(task_config(kind="reasoning_gym", name=name, **fields))


def test_items_are_a_pure_function_of_config_and_index():
    config = {"params": {"min_terms": 2, "max_terms": 2}, "size": 30, "seed": 5}
    first, second = load("chain_sum", **config), load("chain_sum", **config)
    assert [first.item(i) for i in range(30)] == [second.item(i) for i in reversed(range(30))][::-1]
    assert first.item(0) != load("chain_sum", **{**config, "seed": 6}).item(0)


def test_verifier_is_the_data_sets_own():
    task = load("chain_sum", reward="verifier")
    item = task.item(3)
    assert task.verify(item, f" {item.answer}\n") == 1.0
    assert task.verify(item, "banana") < 0.5


def test_unknown_name_lists_close_matches():
    with pytest.raises(TaskError, match=r"'chain_sums'; did you mean chain_sum"):
        load("chain_sums")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"no_such": 1}, "chain_sum does not accept .*no_such"),
        ({"min_terms": 5, "max_terms": 2}, "chain_sum does not accept"),
        ({"seed": 1}, "set seed as task.seed"),
    ],
)
def test_wrong_parameters_are_refused(params, message):
    with pytest.raises(TaskError, match=message):
        load("chain_sum", params=params)
