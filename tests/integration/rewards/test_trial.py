"""A reward is tried on one response before a run: what is wrong with it is said in seconds."""

import time

import pytest
from typer.testing import CliRunner

from leeway.rewards import check_reward
from leeway.tasks import TaskError, task_config

MODULES = {
    "by_name": "def score(response, answer, **kw):\n    return response == answer\n",
    "lists": "def score(completions, **kw):\n    return [1.0 for _ in completions]\n",
    "positional": "def score(text, truth, meta):\n    return 1.0\n",
    "three": "def score(response, answer):\n    return 1.0 if response == answer else\n",
    "nothing": "def score(response, answer):\n    response == answer\n",
    "raises": "def score(response, answer):\n    return {}[answer]\n",
    "hangs": "import time\ndef score(response):\n    time.sleep(60)\n",
    "exits": "raise SystemExit('no GPU')\n",
    "dies": "import os\nos._exit(3)\n",
    "dies_later": "import os\ndef score(response):\n    os.abort()\n",
    "needs_key": "import os\ndef score(response):\n    return len(os.environ['JUDGE_API_KEY'])\n",
    "coroutine": "async def score(response):\n    return 1.0\n",
    "needs_package": "import surely_not_installed\n",
}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    for name, source in MODULES.items():
        (tmp_path / f"own_{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_API_KEY", "12345")


def settings(name, **more):
    return task_config(kind="digits", reward=f"own_{name}:score", reward_timeout_s=1.0, **more)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "lists",
            r"own_lists:score\(completions, \*\*kw\): it requires 'completions', .*rename it to 'response'",
        ),
        (
            "positional",
            r"own_positional:score\(text, truth, meta\): it requires 'text'.*passes by name whichever",
        ),
        ("three", "module 'own_three' cannot be imported .*SyntaxError: invalid syntax"),
        ("nothing", "cannot score a response: .*it returned None .*is a return missing"),
        (
            "raises",
            "cannot score a response: the reward function raised KeyError: .*item 0, '.*', as the response",
        ),
        ("hangs", "cannot score a response: scoring did not end within 1 s"),
        ("exits", "cannot be imported .*SystemExit: no GPU"),
        ("dies", "the process that imports own_dies:score ended before it scored a response"),
        ("dies_later", r"cannot score a response: the reward worker died while scoring \(SIGABRT\)"),
        ("needs_key", "KeyError: 'JUDGE_API_KEY'.*only if task.reward_env names them"),
        ("coroutine", "own_coroutine:score is an async function"),
        ("needs_package", "ModuleNotFoundError: No module named 'surely_not_installed'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(name, message):
    started = time.monotonic()
    with pytest.raises(TaskError, match=message):
        check_reward(settings(name))
    assert time.monotonic() - started < 30


def test_a_reward_that_works_is_called_once():
    assert check_reward(settings("by_name")) == 1.0
    assert check_reward(settings("needs_key", reward_env=["JUDGE_API_KEY"])) == 5.0
    assert check_reward(task_config(kind="digits")) == 1.0


@pytest.mark.slow  # the preflight's tests have a run like it
def test_a_run_with_an_unusable_reward_ends_before_it_starts_anything(tmp_path):
    from leeway_host.cli.app import app

    (tmp_path / "run.yaml").write_text(
        "{model: {name: tiny, max_length: 64}, task: {kind: digits, reward: 'own_lists:score'}}"
    )
    result = CliRunner().invoke(app, ["run", "run.yaml", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "it requires 'completions', which Leeway does not pass" in result.output
    assert not list(tmp_path.glob("out/logs/*"))
