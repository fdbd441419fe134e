"""What test_two_ranks.py compares: the updates of one rank, made there, and of two, made here.

`torchrun two_ranks_worker.py MODEL OUT`: two optimiser steps at each ZeRO stage, and with each correction.
Rank 0 writes what came of them to OUT/<stage>.pt and OUT/<correction>.pt.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from correction_steps import CASES, NAMES, two_steps
from trainer_support import make_batch, run_config

from leeway_trainer.errors import NonFiniteError
from leeway_trainer.model import load_policy_model
from leeway_trainer.policy import Policy
from leeway_trainer.ranks import Ranks, start_ranks, stop_ranks
from leeway_trainer.snapshot import Snapshot, wire_tensors
from leeway_trainer.step import train_step

Result = dict[str, Any]


def plain(row: dict[str, float]) -> dict[str, float]:
    """With keys that torch.load(weights_only=True) reads."""
    return {str(name): value for name, value in row.items()}


def stage_steps(model_dir: Path, ranks: Ranks, stage: int) -> Result:
    """Updated weights, and the metrics of a step without and of one with lag; then all ranks reject a NaN."""
    config = run_config(
        model_dir,
        trainer={
            **run_config(model_dir).trainer.model_dump(),
            "zero_stage": stage,
            "ranks": ranks.size,
            # With 1e-8 AdamW makes a whole step of the rounding of a gradient that is nearly 0.
            "deepspeed": {"optimizer": {"params": {"eps": 1e-3}}},
        },
        weights={"dtype": "float32"},
    )
    model = load_policy_model(model_dir, dtype=torch.float32, chunk_tokens=5)
    snapshot = Snapshot(copy.deepcopy(model), config.trainer, ranks)
    policy = Policy(model, config.trainer, ranks)
    snapshot.refresh(wire_tensors(policy, torch.float32, step=0))
    metrics = train_step(policy, snapshot, make_batch(), config, 0)
    lagging = train_step(policy, snapshot, make_batch(1), config, 1)
    weights = {name: t.clone() for name, t in wire_tensors(policy, torch.float32, step=1)}
    policy._bad_loss = float("nan") if ranks.rank == ranks.size - 1 else None
    try:
        policy.step(5)
    except NonFiniteError:
        return {"weights": weights, "metrics": plain(metrics), "lagging": plain(lagging)}
    raise AssertionError("a loss that is NaN on one rank must stop all of them")


def main() -> None:
    model_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    ranks = start_ranks("cpu", 2, 60.0)
    assert ranks.share_bytes(b"from rank 0" if ranks.first else b"") == b"from rank 0"
    assert ranks.sum([1.0, ranks.rank]) == [2, 1]
    assert ranks.any(ranks.rank == 1)
    rows = torch.full((1 + ranks.rank, 2), float(ranks.rank))
    assert ranks.gather_rows(rows)[:, 0].tolist() == [0, 1, 1]
    for stage in range(4):
        result = stage_steps(model_dir, ranks, stage)
        if ranks.first:
            torch.save(result, out / f"{stage}.pt")
    for name, (method, settings) in zip(NAMES, CASES, strict=True):
        zero_stage = 3 if "head_tail" in settings else 0  # there theta_s has to be gathered, too
        weights, metrics, _ = two_steps(model_dir, ranks, 48, method, settings, zero_stage)
        if ranks.first:
            torch.save({"weights": weights, "metrics": [plain(row) for row in metrics]}, out / f"{name}.pt")
    stop_ranks()


if __name__ == "__main__":
    main()
