"""Two optimiser steps at each ZeRO stage, for test_two_ranks.py: `torchrun two_ranks_worker.py MODEL OUT`.

Rank 0 writes the updated weights, the lag metrics and the scores of both ranks to OUT/<stage>.pt.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from trainer_support import make_batch, run_config

from leeway_trainer.model import load_policy_model
from leeway_trainer.policy import NonFiniteError, Policy
from leeway_trainer.ranks import start_ranks, stop_ranks
from leeway_trainer.snapshot import Snapshot, wire_tensors
from leeway_trainer.step import train_step


def main() -> None:
    model_dir, out, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    ranks = start_ranks("cpu", size, 60.0)
    assert ranks.share_bytes(b"from rank 0" if ranks.first else b"") == b"from rank 0"
    assert ranks.sum([1.0, ranks.rank]) == [size, size * (size - 1) / 2]
    assert ranks.any(ranks.rank == size - 1)
    rows = torch.full((1 + ranks.rank, 2), float(ranks.rank))
    assert ranks.gather_rows(rows)[:, 0].tolist() == [r for r in range(size) for _ in range(1 + r)]
    for stage in range(4 if size > 1 else 1):
        config = run_config(
            model_dir,
            trainer={
                **run_config(model_dir).trainer.model_dump(),
                "zero_stage": stage,
                "ranks": size,
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
        sent = {name: t.clone() for name, t in wire_tensors(policy, torch.float32, step=1)}
        if ranks.first:
            rows = {"metrics": metrics, "lagging": lagging}
            plain = {key: {str(name): value for name, value in row.items()} for key, row in rows.items()}
            torch.save({"weights": sent, **plain}, out / f"{stage}.pt")  # plain names, for weights_only
        policy._bad_loss = float("nan") if ranks.rank == size - 1 else None
        try:
            policy.step(5)
        except NonFiniteError:
            pass
        else:
            raise AssertionError("a loss that is NaN on one rank must stop all of them")
    stop_ranks()


if __name__ == "__main__":
    main()
