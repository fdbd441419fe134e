"""A trainer that dies anywhere between "rollout written" and "checkpoint complete" resumes to the same
batches.

Death is an exception that nothing catches, at a function's door or right behind it; the next trainer finds
only what is on disk and in Redis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from other_side import OtherSide
from trainer_support import make_rollout, run_config

import leeway_trainer.checkpoint as ckpt
import leeway_trainer.durability as durability
import leeway_trainer.learner as learner
import leeway_trainer.transports.kinds.redis as transport
from leeway.batches import prompts_digest
from leeway.checkpoints.find import find_checkpoint
from leeway.checkpoints.state import read_state
from leeway_host.launch.history import check_order, check_starts, is_repeat
from leeway_trainer.assemble import BatchAssembler
from leeway_trainer.epochs import TrainerSetup
from leeway_trainer.feed import Feed
from leeway_trainer.snapshot import Snapshot
from leeway_trainer.train import Trainer

STEPS, EVERY = 6, 2
POINTS: dict[str, tuple[Any, str, bool, int]] = {
    # owner, function, die before it (or right after it), at which call
    "a rollout is read": (BatchAssembler, "add", False, 15),
    "a batch is taken": (Feed, "take", False, 3),
    "a step begins": (learner, "train_step", True, 3),
    "a step is done": (learner, "train_step", False, 2),
    "a step is reported": (Feed, "report", False, 3),
    "new weights begin": (transport, "publish_weights", True, 2),
    "new weights are out": (transport, "publish_weights", False, 2),
    "their copy is renewed": (Snapshot, "refresh", False, 2),
    "old rollouts are void": (Feed, "renew", False, 1),
    "a checkpoint begins": (durability, "save_checkpoint", True, 1),
    "the second checkpoint begins": (durability, "save_checkpoint", True, 2),
    "the state is written": (ckpt, "sync_tree", True, 2),
    "the checkpoint is on disk": (ckpt, "sync_tree", False, 2),
    "it has its name": (ckpt, "replace_text", True, 2),
    "it is the latest": (ckpt, "replace_text", False, 2),
    "the old ones are gone": (ckpt, "prune", False, 2),
    "its rollouts are acknowledged": (Feed, "durable", False, 2),
}


class Died(BaseException):
    """As if killed: no handler of ours sees it."""


def die_at(owner: Any, name: str, before: bool, call: int) -> Callable[..., Any]:
    original, calls = getattr(owner, name), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if before and calls == call:
            raise Died
        result = original(*args, **kwargs)
        if not before and calls == call:
            raise Died
        return result

    return dying


def expected(batch: int, groups: int, size: int) -> str:
    return prompts_digest(make_rollout(batch, g, i).prompt_ids for g in range(groups) for i in range(size))


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_resumes_to_the_same_batches(tiny_dir, ranks, keys, client, tmp_path, monkeypatch, point):
    config = run_config(
        tiny_dir,
        trainer={"dtype": "float32", "steps": STEPS, "checkpoint_every": EVERY},
        sync={"max_age": 2, "stall_timeout_s": 20.0},
        output={"save_model": False},
    )
    setup = TrainerSetup(str(tiny_dir), tmp_path / "run", keys, client)
    owner, name, before, call = POINTS[point]
    with OtherSide(client, keys, config) as other:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, die_at(owner, name, before, call))
            with pytest.raises(Died):
                Trainer(config, ranks, setup).run()
        latest = setup.out / "checkpoints" / "latest"
        resume = setup.out if latest.exists() else None
        Trainer(config, ranks, dataclasses.replace(setup, resume=resume)).run()
        other.wait_for(lambda: other.reports[-1].event == "finished")
    reports = [
        report
        for last, report in zip([None, *other.reports], other.reports, strict=False)
        if not is_repeat(last, report)
    ]
    assert check_order(reports, STEPS) == []
    assert check_starts(reports, EVERY) == []
    steps = [report for report in reports if report.event == "step"]
    assert {r.step for r in steps} == set(range(STEPS))
    for report in steps:
        assert report.metrics["batch/digest"] == expected(report.step, 2, 3)
    assert read_state(find_checkpoint(setup.out)).next_batch == STEPS
    assert client.xlen(keys.rollouts) == 0
    assert client.xpending(keys.rollouts, "trainer")["pending"] == 0
    left = [path.name for path in (setup.out / "checkpoints").iterdir() if path.name.startswith(".")]
    assert left == []
