"""What ends the waits of the loop, and what its liveness probe sees."""

from __future__ import annotations

import threading

import pytest
from other_side import OtherSide
from trainer_support import run_config, short_run

from leeway.errors import StalledError
from leeway_trainer.errors import StoppedError
from leeway_trainer.process import longest_wait_s
from leeway_trainer.train import Trainer


def test_a_stall_names_the_slots(tiny_dir, ranks, setup, client, keys):
    config = run_config(
        tiny_dir,
        trainer=short_run(steps=2),
        sync={"stall_timeout_s": 0.5},
        sampler={"start_timeout_s": 0.5},
    )

    def without_one(rollout):
        return [] if (rollout.header.group, rollout.header.index) == (1, 2) else [rollout]

    with (
        OtherSide(client, keys, config, edit=without_one),
        pytest.raises(StalledError, match="1 of batch 0: 1/2"),
    ):
        Trainer(config, ranks, setup).run()


def test_stop_ends_the_wait_at_once(tiny_dir, ranks, setup):
    run = Trainer(run_config(tiny_dir, trainer=short_run()), ranks, setup)
    run.stopping = True
    with pytest.raises(StoppedError, match="while waiting for rollouts"):
        run.run()


def test_a_loop_that_waits_is_alive_and_one_that_hangs_is_not(
    tiny_dir, ranks, setup, client, keys, monkeypatch
):
    config = run_config(tiny_dir, trainer=short_run(steps=1), sync={"stall_timeout_s": 60.0})
    hangs, reached = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        reached.set()
        assert hangs.wait(60)
        raise StoppedError("the test is over")

    monkeypatch.setattr("leeway_trainer.learner.train_step", hang)
    run = Trainer(config, ranks, setup)

    def run_until_stopped() -> None:
        with pytest.raises(StoppedError):
            run.run()

    with OtherSide(client, keys, config) as other:
        other.hold.set()
        working = threading.Thread(target=run_until_stopped)
        working.start()
        other.wait_for(lambda: bool(other.manifests))
        for _ in range(3):  # the loop goes on while it waits for rollouts
            before = run._lived_at
            other.wait_for(lambda before=before: run._lived_at > before)
        other.hold.clear()
        other._generate(0, run.epoch.number, 0)
        assert reached.wait(60)
        other.wait_for(lambda: run.seconds_since_progress() > 1.0)
        hangs.set()
        working.join(60)


def test_the_liveness_budget_covers_the_longest_wait_of_a_rank_that_is_well(tiny_dir):
    config = run_config(tiny_dir)
    # leeway.diagnose.is_stalled ends the wait for rollouts after both, one after the other.
    assert longest_wait_s(config) >= config.sync.stall_timeout_s + config.sampler.start_timeout_s + 600
