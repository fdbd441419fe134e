"""The modules of the example package, each by itself."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from leeway.config.load import build_config
from leeway.corrections.batch import Denominators, TokenBatch
from leeway.policies import SyncFacts
from leeway.tasks import Task, TaskError, TaskItem

SOURCE = Path(__file__).parents[2] / "plugin" / "src"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SOURCE))
    return lambda name: import_module(f"leeway_example.{name}")


def test_the_gradient_of_the_method_is_its_formula(load: Any) -> None:
    method = load("theirs").METHOD
    config = method.settings(cap=2.0)
    logp = torch.tensor([-1.0, -0.5, -3.0], requires_grad=True)
    logp_mu, advantages = torch.tensor([-2.0, -0.5, -1.0]), torch.tensor([1.0, -2.0, 0.5])
    batch = TokenBatch(
        logp=logp,
        logp_sync=logp.detach(),
        logp_mu=logp_mu,
        advantages=advantages,
        mask=torch.ones(3, dtype=torch.bool),
        seq_ids=torch.arange(3),
        denominators=Denominators(3, 3, 1),
    )
    loss, metrics = method.loss(batch, config)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    r = torch.exp(logp.detach() - logp_mu)
    weight = r / (1 + r / 2.0)
    torch.testing.assert_close(-gradient, advantages * weight)
    torch.testing.assert_close(metrics["weight/mean"], weight.mean())
    assert weight.max() < 2.0


def test_the_policy_looks_at_the_reward(load: Any) -> None:
    module = load("low_reward")
    config = module.LowRewardConfig(below=0.5)
    for reward, wanted in ((0.4, True), (0.5, False), (0.9, False)):
        facts = SyncFacts(
            step=0, age=1, ess_token=1.0, ess_sequence=1.0, clip_fraction=0.0, metrics={"reward/mean": reward}
        )
        assert module.POLICY.wants_resync(facts, config) is wanted


def test_the_task_is_a_function_of_the_index(load: Any) -> None:
    kind = load("reverse").TASK
    task = kind.build(kind.settings(length=5, size=10))
    assert isinstance(task, Task) and len(task) == 10
    item = task.item(3)
    assert item == kind.build(kind.settings(length=5)).item(3)
    assert item.answer == item.prompt.removeprefix("r:").removesuffix("=")[::-1] and len(item.answer) == 5
    assert (task.verify(item, item.answer), task.verify(item, "x")) == (1.0, 0.0)


def test_the_reward_is_the_share_of_the_answer(load: Any) -> None:
    reward = load("prefix").REWARD
    item, task = TaskItem(0, "p", "abcd"), load("reverse").TASK.build(load("reverse").ReverseConfig())
    scores = [reward.score(item, text, task) for text in ("abcd", " abx", "bcd", "", "abcde")]
    assert scores == [1.0, 0.5, 0.0, 0.0, 1.0]
    with pytest.raises(TaskError, match="answer of item 0 of reverse is empty"):
        reward.check(TaskItem(0, "p", ""), task)


def test_nothing_is_registered_without_the_package() -> None:
    with pytest.raises(Exception, match="unknown correction 'theirs'"):
        build_config({"task": {"kind": "digits"}, "correction": {"method": "theirs"}})
