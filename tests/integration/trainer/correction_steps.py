"""Two optimiser steps with each correction, for test_methods.py and test_two_ranks.py."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from trainer_support import make_batch, run_config

from leeway.corrections import METHODS
from leeway_trainer.model import load_policy_model
from leeway_trainer.policy import Policy
from leeway_trainer.ranks import Ranks
from leeway_trainer.sharing import PADDED
from leeway_trainer.snapshot import Snapshot, wire_tensors
from leeway_trainer.step import micro_batches, train_step

CASES: list[tuple[str, dict[str, object]]] = [
    *((method, {}) for method in METHODS),
    ("m2po", {"variant": "areal"}),
    ("m2po", {"variant": "repo"}),
    ("decoupled_ppo", {"prox_logp_method": "loglinear"}),
    ("tis", {"score_centering": True}),
    ("ppo", {"reference": "sync", "score_centering": True}),
    ("is", {"level": "sequence"}),
    ("dlc", {"aggregation": "seq-mean-token-mean"}),
    ("dlc", {"head_tail": "sync", "lag_clip": "clamp"}),
    ("tis", {"head_tail": "sync", "score_centering": True}),
]
NAMES = ["-".join([method, *map(str, settings.values())]) for method, settings in CASES]
Steps = tuple[dict[str, torch.Tensor], list[dict[str, float]], int]


def two_steps(
    tiny_dir: Path,
    ranks: Ranks,
    budget: int,
    method: str,
    settings: dict[str, object],
    zero_stage: int = 0,
    packed: bool = True,
) -> Steps:
    """Weights after two steps (the second one with lag), metrics of both, micro-batches of this rank."""
    config = run_config(
        tiny_dir,
        correction={"method": method, **settings},
        trainer={
            "micro_batch_tokens": budget,
            "learning_rate": 1e-3,
            "ranks": ranks.size,
            "zero_stage": zero_stage,
            # With 1e-8 AdamW makes a whole step of the rounding of a gradient that is nearly 0.
            "deepspeed": {"optimizer": {"params": {"eps": 1e-2}}},
        },
        weights={"dtype": "float32"},
    )
    model = load_policy_model(tiny_dir, dtype=torch.float32, chunk_tokens=5)
    if not packed:
        model.lm.set_attn_implementation(PADDED)
    snapshot = Snapshot(copy.deepcopy(model), config.trainer, ranks)
    policy = Policy(model, config.trainer, ranks)
    snapshot.refresh(wire_tensors(policy, torch.float32, step=0))
    metrics = [train_step(policy, snapshot, make_batch(step), config, step, age=step) for step in range(2)]
    weights = {name: t.clone() for name, t in wire_tensors(policy, torch.float32, step=2)}
    return weights, metrics, len(micro_batches(policy, make_batch(0), config))


def assert_same(
    one: tuple[dict[str, torch.Tensor], list[dict[str, float]]],
    other: tuple[dict[str, torch.Tensor], list[dict[str, float]]],
) -> None:
    """Weights and metrics are equal but for rounding."""
    for name, tensor in one[0].items():
        assert torch.allclose(tensor, other[0][name], atol=1e-6), name
    for a, b in zip(one[1], other[1], strict=True):
        assert a["grad_norm"] > 0
        assert a.keys() == b.keys()
        for name, value in a.items():
            if not name.startswith("time/"):
                # Log-probabilities near 10 nats are rounded to 1e-6 in float32; an extreme shows it.
                assert value == pytest.approx(b[name], rel=1e-4, abs=5e-6), name
