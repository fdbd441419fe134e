"""Two optimiser steps with a correction: what test_methods.py does here with one rank and, run under torchrun
(`methods_worker.py MODEL OUT`), with two. Rank 0 writes one file per case.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from trainer_support import make_batch, run_config

from leeway.corrections import METHODS
from leeway_trainer.model import load_policy_model
from leeway_trainer.policy import Policy
from leeway_trainer.ranks import Ranks, start_ranks, stop_ranks
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


def main() -> None:
    tiny_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    ranks = start_ranks("cpu", 2, 60.0)
    for name, (method, settings) in zip(NAMES, CASES, strict=True):
        zero_stage = 3 if "head_tail" in settings else 0  # there theta_s has to be gathered, too
        weights, metrics, _ = two_steps(tiny_dir, ranks, 48, method, settings, zero_stage)
        if ranks.first:
            plain = [{str(name): value for name, value in row.items()} for row in metrics]  # for weights_only
            torch.save({"weights": weights, "metrics": plain}, out / f"{name}.pt")
    stop_ranks()


if __name__ == "__main__":
    main()
