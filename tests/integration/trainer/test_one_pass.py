"""While theta still is theta_s, log pi_s is log pi_theta: fewer passes, the same step."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from trainer_support import make_batch, run_config

from leeway_trainer.model import load_policy_model
from leeway_trainer.policy import Policy
from leeway_trainer.ranks import Ranks
from leeway_trainer.snapshot import Snapshot, wire_tensors
from leeway_trainer.step import train_step

CASES = {
    "dlc": ({"method": "dlc"}, 0, 0),
    "m2po, which prepares": ({"method": "m2po"}, 1, 0),
    "tail of theta_s": ({"method": "dlc", "head_tail": "sync"}, 1, 0),
}
"""settings -> passes of theta_s, and of theta without gradient"""


class Counted:
    """Wraps a scoring function and counts its calls."""

    def __init__(self, score) -> None:  # type: ignore[no-untyped-def]
        self.score, self.calls = score, 0

    def __call__(self, *args: object) -> object:
        self.calls += 1
        return self.score(*args)


def one_step(
    tiny_dir: Path, ranks: Ranks, correction: dict[str, object], wire: torch.dtype, **trainer: object
) -> tuple[Policy, Snapshot, dict[str, float], tuple[int, int]]:
    config = run_config(
        tiny_dir,
        correction=correction,
        trainer={
            "micro_batch_tokens": 4096,
            "deepspeed": {"optimizer": {"params": {"eps": 1e-2}}},
            **trainer,
        },
    )
    model = load_policy_model(tiny_dir, dtype=torch.float32, chunk_tokens=5)
    snapshot = Snapshot(copy.deepcopy(model), config.trainer, ranks)
    policy = Policy(model, config.trainer, ranks)
    snapshot.refresh(wire_tensors(policy, wire, step=0))
    calls = Counted(snapshot.score), Counted(policy.score)
    snapshot.score, policy.score = calls  # type: ignore[method-assign, assignment]
    metrics = train_step(policy, snapshot, make_batch(), config, 0)
    return policy, snapshot, metrics, (calls[0].calls, calls[1].calls)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_pass_is_not_made_twice(
    tiny_dir: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, case: str, stage: int
) -> None:
    correction, *passes = CASES[case]
    policy, snapshot, metrics, calls = one_step(tiny_dir, ranks, correction, torch.float32, zero_stage=stage)
    assert calls == tuple(passes)
    assert not snapshot.equals(policy), "theta was updated"
    monkeypatch.setattr(Snapshot, "equals", lambda *_: False)
    plain, _, want, calls = one_step(tiny_dir, ranks, correction, torch.float32, zero_stage=stage)
    assert calls[0] == 1
    for (name, x), (_, y) in zip(
        wire_tensors(policy, torch.float32, step=1), wire_tensors(plain, torch.float32, step=1), strict=True
    ):
        assert torch.equal(x, y), name
    for name, value in want.items():
        assert name.startswith("time/") or metrics[name] == value, name


def test_weights_that_are_rounded_on_the_wire_are_scored(tiny_dir: Path, ranks: Ranks) -> None:
    _, _, metrics, calls = one_step(tiny_dir, ranks, {"method": "dlc"}, torch.bfloat16)
    assert calls == (1, 0)
    assert metrics["lag/ess_tok"] < 1.0
