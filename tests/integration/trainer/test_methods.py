"""Every correction through the trainer's own step: the split into micro-batches does not matter."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from trainer_support import make_batch, run_config

from leeway.corrections.names import METHOD_NAMES
from leeway_trainer.model import load_policy_model
from leeway_trainer.policy import Policy
from leeway_trainer.ranks import Ranks
from leeway_trainer.snapshot import Snapshot, wire_tensors
from leeway_trainer.step import train_step

CASES = [(method, {}) for method in METHOD_NAMES] + [
    ("m2po", {"m2_variant": "areal"}),
    ("m2po", {"m2_variant": "repo"}),
    ("decoupled_ppo", {"prox_logp_method": "loglinear"}),
    ("tis", {"score_centering": True}),
    ("ppo", {"reference": "sync", "score_centering": True}),
    ("is", {"is_level": "sequence"}),
    ("dlc", {"aggregation": "seq-mean-token-mean"}),
    ("dlc", {"head_tail": "sync", "lag_clip": "clamp"}),
    ("tis", {"head_tail": "sync", "score_centering": True}),
]


def two_steps(
    tiny_dir: Path, ranks: Ranks, budget: int, method: str, settings: dict[str, object]
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights after two steps (the second one with lag), and the metrics of both."""
    config = run_config(
        tiny_dir,
        correction={"method": method, **settings},
        trainer={
            "micro_batch_tokens": budget,
            "learning_rate": 1e-3,
            # With 1e-8 AdamW makes a whole step of the rounding of a gradient that is nearly 0.
            "deepspeed": {"optimizer": {"params": {"eps": 1e-2}}},
        },
        weights={"dtype": "float32"},
    )
    model = load_policy_model(tiny_dir, dtype=torch.float32, chunk_tokens=5)
    snapshot = Snapshot(copy.deepcopy(model), config.trainer, ranks)
    policy = Policy(model, config.trainer, ranks)
    snapshot.refresh(wire_tensors(policy, torch.float32, step=0))
    metrics = [train_step(policy, snapshot, make_batch(step), config, step, age=step) for step in range(2)]
    return {name: t.clone() for name, t in wire_tensors(policy, torch.float32, step=2)}, metrics


@pytest.mark.parametrize(("method", "settings"), CASES, ids=lambda v: v if isinstance(v, str) else str(v))
def test_micro_batches_do_not_change_the_update(
    tiny_dir: Path, ranks: Ranks, method: str, settings: dict[str, object]
) -> None:
    whole, of_whole = two_steps(tiny_dir, ranks, 4096, method, settings)
    split, of_split = two_steps(tiny_dir, ranks, 48, method, settings)
    for name, tensor in whole.items():
        assert torch.allclose(tensor, split[name], atol=1e-6), name
    for a, b in zip(of_whole, of_split, strict=True):
        assert a["grad_norm"] > 0
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["lr"] == pytest.approx(b["lr"], rel=1e-5)
    before = dict(load_policy_model(tiny_dir, dtype=torch.float32, chunk_tokens=5).lm.named_parameters())
    assert any(not torch.equal(before[name], tensor) for name, tensor in whole.items())


def test_vcpo_changes_the_learning_rate_of_its_step(tiny_dir: Path, ranks: Ranks) -> None:
    _, plain = two_steps(tiny_dir, ranks, 4096, "none", {})
    _, scaled = two_steps(tiny_dir, ranks, 4096, "vcpo", {})
    assert plain[0]["lr"] == pytest.approx(1e-3)
    assert 0 < scaled[0]["lr"] < 1e-3
