"""Functions of users: which arguments they get, and what their signature and their result must be."""

import functools
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from leeway.rewards import load_reward
from leeway.rewards.callables import ARGUMENTS, choose_arguments, read_reward
from leeway.rewards.environment import reward_environment
from leeway.tasks import TaskError, TaskItem, load_task, task_config

CHAT = ({"role": "system", "content": "Count."}, {"role": "user", "content": "1+1"})


def response_alone(response):
    return 1.0


def trl_by_name(response, answer, **kw):
    return sorted(kw)


def everything(response, answer, prompt, item, metadata, messages):
    return (response, answer, prompt, item.index, metadata, messages)


def old_order(response, answer, metadata):
    return 1.0


def other_order(answer, response, weight=2.0):
    return 1.0


def by_keyword(*, response):
    return 1.0


def any_position(*args, response):
    return 1.0


class Scorer:
    def __call__(self, response):
        return 1.0

    def method(self, response, answer):
        return 1.0


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (response_alone, ["response"]),
        (trl_by_name, list(ARGUMENTS)),
        (everything, list(ARGUMENTS)),
        (old_order, ["response", "answer", "metadata"]),
        (other_order, ["response", "answer"]),
        (by_keyword, ["response"]),
        (any_position, ["response"]),
        (Scorer(), ["response"]),
        (Scorer().method, ["response", "answer"]),
        (functools.partial(other_order, weight=1.0), ["response", "answer"]),
        (lambda prompt: 1.0, ["prompt"]),
    ],
)
def test_a_function_gets_what_it_takes(function, names):
    assert choose_arguments(function, "m:f") == names


def positional_only(response, /):
    return 1.0


def trl_lists(completions, prompts, **kw):
    return [1.0]


def defaults_elsewhere(answer, completion=None):
    return float(completion == answer)


def half_renamed(response, answer, extra_info=None, **kw):
    return 1.0


def verl_names(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


async def coroutine(response):
    return 1.0


def generator(response):
    yield 1.0


class AsyncScorer:
    async def __call__(self, response):
        return 1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (positional_only, "'response' is positional-only, and arguments are passed by name"),
        (trl_lists, "'completions', which Leeway does not pass; rename it to 'response'.*TRL passes lists"),
        (verl_names, "'solution_str', .*rename it to 'response'.*'ground_truth', .*rename it to 'answer'"),
        (defaults_elsewhere, "'completion' would keep its default, .* passes it as 'response': rename it"),
        (half_renamed, "'extra_info' would keep its default, .* passes it as 'metadata'"),
        (lambda: 1.0, "takes nothing that Leeway passes: response, answer, prompt, messages, metadata, item"),
        (lambda *args: 1.0, "takes nothing that Leeway passes"),
        (
            lambda text, truth, meta: 1.0,
            "it requires 'text', which Leeway does not pass; it requires 'truth'",
        ),
        (coroutine, "is an async function"),
        (AsyncScorer(), "is an async function"),
        (generator, "is a generator"),
        (Scorer, "is a class; expected a function, or an instance"),
        (dict.get, "positional-only|no signature"),
        (max, "no signature that Python can read"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(function, message):
    with pytest.raises(TaskError, match=f"task.reward: m:f.*{message}"):
        choose_arguments(function, "m:f")


def test_values_of_the_arguments(tmp_path, monkeypatch):
    (tmp_path / "seen.py").write_text(
        "def score(response, answer, prompt, item, metadata, messages):\n"
        "    assert (response, answer, item.index, metadata) == ('r', 'a', 3, {'m': 1})\n"
        "    assert prompt == [{'role': 'system', 'content': 'Count.'}, {'role': 'user', 'content': '1+1'}]\n"
        "    assert messages == [{'role': 'system', 'content': 'Be brief.'}, *prompt[:1],\n"
        "                        {'role': 'user', 'content': '1+1 ='}]\n"
        "    return True\n"
    )
    monkeypatch.chdir(tmp_path)
    config = task_config(kind="digits", reward="seen:score", system_prompt="Be brief.", prompt_suffix=" =")
    score = load_reward(config, load_task(config))
    assert score(TaskItem(3, CHAT, "a", {"m": 1}), "r") == 1.0


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (Fraction(1, 2), 0.5),
        (Decimal("0.5"), 0.5),
    ],
)
def test_numbers_of_all_kinds_are_rewards(value, reward):
    assert read_reward(value) == reward


def test_a_scalar_of_torch_is_a_reward():
    torch = pytest.importorskip("torch")
    assert read_reward(torch.tensor(0.5, requires_grad=True)) == 0.5
    with pytest.raises(TypeError, match="expected one number"):
        read_reward(torch.tensor([0.5]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"it returned None \(NoneType\); expected one number: is a return missing"),
        ("1.0", r"it returned '1.0' \(str\)"),
        ([1.0], r"it returned \[1.0\] \(list\); .*one response at a time"),
        ({"score": 1.0}, r"\(dict\); .*return the value that counts"),
        (np.array([0.5]), r"\(ndarray\)"),
        (1j, r"\(complex\)"),
        (float("nan"), "it returned nan; expected a finite number"),
        (np.float64("inf"), "it returned inf"),
        (10**400, "too large"),
    ],
)
def test_anything_else_is_refused(value, message):
    with pytest.raises((TypeError, ValueError, OverflowError), match=message):
        read_reward(value)


def test_a_module_in_the_working_directory_that_another_one_hides_is_named(tmp_path, monkeypatch):
    (tmp_path / "colorsys.py").write_text("def score(response):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    config = task_config(kind="digits", reward="colorsys:score")
    with pytest.raises(
        TaskError, match=r"which is found before .*colorsys.py: rename that file.*nothing named"
    ):
        load_reward(config, load_task(config))


SECRETS = """LEEWAY_REDIS_URL LEEWAY_REDIS_PASSWORD LEEWAY_REDIS__URL HF_TOKEN OPENAI_API_KEY AWS_PROFILE
    AWS_SECRET_ACCESS_KEY WANDB_API_KEY GITHUB_TOKEN DATABASE_URL PYTHON_KEYRING_TOKEN SSH_AUTH_SOCK"""
NEEDED = """PATH HOME LANG LC_ALL PYTHONPATH PYTHONHASHSEED CUDA_VISIBLE_DEVICES OMP_NUM_THREADS https_proxy
    NO_PROXY HF_HOME TMPDIR LD_LIBRARY_PATH"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_secrets_do_not_reach_reward_code(name):
    assert reward_environment({name: "x"}) == {}
    assert reward_environment({name: "x"}, [name]) == {name: "x"}


def test_what_programs_need_reaches_reward_code():
    needed = dict.fromkeys(NEEDED.split(), "x")
    assert reward_environment(needed) == needed
