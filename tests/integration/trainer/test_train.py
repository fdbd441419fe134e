"""The loop in this process, over a real server, with a made-up controller and sampler."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch
from other_side import OtherSide
from trainer_support import make_rollout, run_config, short_run

from leeway.checkpoints.find import find_checkpoint
from leeway.checkpoints.state import read_state
from leeway.messages import SamplerStatus, Verdict, VerdictHeader, decode
from leeway.statuses import write_status
from leeway.streams import append, now
from leeway.weights import ChunkSource, HostCopy
from leeway_trainer.model import load_policy_model
from leeway_trainer.train import Trainer


def test_a_run_from_start_to_end(tiny_dir, ranks, setup, client, keys):
    config = run_config(tiny_dir, trainer=short_run(), sync={"max_age": 2, "stall_timeout_s": 20.0})
    with OtherSide(client, keys, config) as other:
        Trainer(config, ranks, setup).run()
        other.wait_for(lambda: other.reports[-1].event == "finished")
    assert [(r.event, r.step) for r in other.reports] == [
        ("started", 0),
        *(("step", k) for k in range(5)),
        ("finished", 5),
    ]
    steps = other.steps()
    assert [r.version for r in steps] == [0, 0, 1, 1, 2]
    assert [r.age for r in steps] == [1, 2, 1, 2, 1]
    assert [r.metrics["lag/age"] for r in steps] == [0, 1, 0, 1, 0]
    for report in steps:
        fresh = report.metrics["lag/age"] == 0
        assert (report.metrics["lag/ess_tok"] == 1.0) == fresh, "bf16 theta and theta_s are the same numbers"
        assert (report.metrics["lag/var"] == 0.0) == fresh
        assert report.metrics["verdict/self"] == 0
        assert report.metrics["disc/abs_mean"] > 0.1, "the made-up mu has nothing to do with the model"
        for name in (
            "reward/mean",
            "loss",
            "grad_norm",
            "lr",
            "center/abs_coef_sum",
            "time/wait_s",
            "time/step_s",
        ):
            assert name in report.metrics
    assert [(m.version, m.step) for m in other.manifests] == [(0, 0), (1, 2), (2, 4)]
    assert client.xlen(keys.rollouts) == 0, "all rollouts are in a checkpoint"
    assert read_state(find_checkpoint(setup.out)).next_batch == 5
    assert load_policy_model(setup.out / "model", dtype=torch.float32, chunk_tokens=9)


def test_what_is_published_is_theta(tiny_dir, ranks, setup, client, keys):
    config = run_config(tiny_dir, trainer=short_run(steps=2), sync={"max_age": 1, "stall_timeout_s": 20.0})
    with OtherSide(client, keys, config) as other:
        run = Trainer(config, ranks, setup)
        run.run()
    copy, source = HostCopy(), ChunkSource(client)
    copy.advance(source, keys, other.manifests[:1])
    sent = copy.tensors()
    start = load_policy_model(tiny_dir, dtype=torch.bfloat16, chunk_tokens=9)
    for name, param in start.lm.named_parameters():
        assert torch.equal(sent[name], param)
    assert [m.codec for m in other.manifests] == ["full", "delta"]
    copy.advance(source, keys, other.manifests[1:])
    last = copy.tensors()
    assert any(not torch.equal(last[name], sent[name]) for name in sent)
    for name, param in run.learner.theta_s.runner.lm.named_parameters():
        assert torch.equal(last[name], param), "theta_s is what samplers hold"


def test_a_keyframe_is_sent_when_a_sampler_is_stuck(tiny_dir, ranks, setup, client, keys):
    config = run_config(tiny_dir, trainer=short_run(steps=2), sync={"max_age": None, "stall_timeout_s": 20.0})
    with OtherSide(client, keys, config) as other:
        other.hold.set()  # nobody can draw under version 0
        run = Trainer(config, ranks, setup)

        def complain() -> None:
            other.wait_for(lambda: bool(other.manifests))
            status = SamplerStatus(
                sampler="s0", heartbeat=now(), config=other.digest, stuck=other.manifests[0].key
            )
            other.hold.clear()
            write_status(client, keys, status, budget_s=5)

        asking = threading.Thread(target=complain)
        asking.start()
        run.run()
        asking.join()
    assert [(m.version, m.codec, m.step) for m in other.manifests] == [(0, "full", 0), (1, "full", 0)]


def test_without_a_controller_the_trainer_applies_the_same_policy(tiny_dir, ranks, setup, client, keys):
    config = run_config(
        tiny_dir,
        trainer=short_run(steps=3),
        sync={"max_age": 1, "verdict_timeout_s": 0.2, "stall_timeout_s": 20.0},
    )
    with OtherSide(client, keys, config, verdicts=False) as other:
        Trainer(config, ranks, setup).run()
        other.wait_for(lambda: other.reports[-1].event == "finished")
    assert [m.version for m in other.manifests] == [0, 1, 2]
    assert [r.metrics["verdict/self"] for r in other.steps()] == [0, 1, 1], "part of the next report"


def test_a_late_resync_is_done_while_waiting(tiny_dir, ranks, setup, client, keys):
    config = run_config(tiny_dir, trainer=short_run(steps=2), sync={"max_age": None, "stall_timeout_s": 20.0})
    with OtherSide(client, keys, config, verdicts=False) as other:
        original = other._on_report

        def late(report):
            if report.event != "step" or report.step != 0:
                return original(report)
            other.reports.append(report)

        other._on_report = late
        run = Trainer(config, ranks, setup)

        def ask() -> None:
            other.wait_for(lambda: len(other.steps()) == 1)
            time.sleep(1.0)  # beyond verdict_timeout_s: the trainer has continued
            header = VerdictHeader(epoch=run.epoch.number, step=0, action="resync", reason="manual")
            append(client, keys.verdicts, Verdict(header))

        asking = threading.Thread(target=ask)
        asking.start()
        run.run()
        asking.join()
    assert [(m.version, m.step) for m in other.manifests] == [(0, 0), (1, 1)]
    assert [r.version for r in other.steps()] == [0, 1]


def test_duplicates_and_void_rollouts_change_nothing(tiny_dir, ranks, setup, client, keys):
    def noisy(rollout):
        other_epoch = rollout.header.model_copy(update={"epoch": rollout.header.epoch + 7})
        lost = dataclasses.replace(rollout, header=other_epoch)
        changed = rollout.header.model_copy(update={"reward": 99.0})
        return [lost, rollout, dataclasses.replace(rollout, header=changed)]

    config = run_config(tiny_dir, trainer=short_run(steps=2), sync={"stall_timeout_s": 20.0})
    with OtherSide(client, keys, config, edit=noisy) as other:
        Trainer(config, ranks, setup).run()
        other.wait_for(lambda: other.reports[-1].event == "finished")
    assert all(r.metrics["reward/mean"] <= 1 for r in other.steps())
    tokens = sum(r.metrics["tokens"] for r in other.steps())
    assert sum(r.metrics["tokens/voided"] for r in other.steps()) == pytest.approx(tokens, abs=12)


def test_rollouts_stay_until_a_checkpoint_holds_them(tiny_dir, ranks, setup, client, keys):
    config = run_config(
        tiny_dir, trainer=short_run(steps=4, checkpoint_every=3), sync={"stall_timeout_s": 20.0}
    )
    with OtherSide(client, keys, config) as other:
        run = Trainer(config, ranks, setup)
        kept = []
        original = run.durability.save_if_due

        def watch(*arguments) -> None:
            original(*arguments)
            pending = client.xpending(keys.rollouts, "trainer")["pending"]
            kept.append((run.next_batch, pending >= 6))

        run.durability.save_if_due = watch
        run.run()
    assert other.steps()
    assert kept[:2] == [(1, True), (2, True)]
    assert client.xpending(keys.rollouts, "trainer")["pending"] == 0


def test_resume_continues_with_a_new_epoch_and_a_higher_version(tiny_dir, ranks, setup, client, keys):
    config = run_config(tiny_dir, trainer=short_run(steps=5), sync={"max_age": 2, "stall_timeout_s": 20.0})
    with OtherSide(client, keys, config) as other:
        first = Trainer(config, ranks, setup)
        original = first.durability.save_if_due

        def die_after_three(*arguments) -> None:
            original(*arguments)
            if first.next_batch == 3:
                raise RuntimeError("as if killed")

        first.durability.save_if_due = die_after_three
        with pytest.raises(RuntimeError, match="as if killed"):
            first.run()
        left = client.xlen(keys.rollouts)
        assert left >= 6, "step 2 is in no checkpoint, so its rollouts are still there"
        again = Trainer(config, ranks, dataclasses.replace(setup, resume=setup.out))
        assert (again.next_batch, again.versions.version) == (2, 2), (
            "version 1 was published before the checkpoint"
        )
        assert again.epoch.number > first.epoch.number
        again.run()
        other.wait_for(lambda: other.reports[-1].event == "finished")
    events = [(r.event, r.step, r.epoch - first.epoch.number) for r in other.reports]
    assert events == [
        ("started", 0, 0),
        ("step", 0, 0),
        ("step", 1, 0),
        ("step", 2, 0),
        ("started", 2, 1),
        ("step", 2, 1),
        ("step", 3, 1),
        ("step", 4, 1),
        ("finished", 5, 1),
    ]
    assert client.xlen(keys.rollouts) == 0


def test_made_up_rollouts_are_valid():
    from leeway.messages import Rollout, encode

    rollout = make_rollout(3, 1, 2, complete=True)
    assert decode(Rollout, encode(rollout)).header == rollout.header


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_first_fresh_batch_is_scored_with_the_old_weights_too(
    tiny_dir, ranks, setup, client, keys, dtype
):
    config = run_config(
        tiny_dir,
        trainer=short_run(steps=6, dtype=dtype, learning_rate=1e-2),
        sync={"max_age": 2, "stall_timeout_s": 20.0},
        checks={"self_prefix_every": 4},
    )
    with OtherSide(client, keys, config) as other:
        Trainer(config, ranks, setup).run()
        other.wait_for(lambda: other.reports[-1].event == "finished")
    steps = other.steps()
    measured = [r.step for r in steps if "kl/self_prefix" in r.metrics]
    assert measured == [2], "the next resync, at step 4, came within self_prefix_every steps"
    fresh = steps[2].metrics
    assert (fresh["lag/age"], fresh["lag/ess_tok"]) == (0, pytest.approx(1, abs=1e-3))
    assert fresh["kl/self_prefix"] > 0
    assert fresh["kl/sampler_prefix"] > 0
    assert 0 < fresh["resync/missing_se"] < 1
    assert [m.version for m in other.manifests] == [0, 1, 2]
    assert steps[4].metrics["lag/ess_tok"] == pytest.approx(1, abs=1e-3), "also after the deferred refresh"
    for report in steps:
        assert report.metrics["data/missing"] == 0
        assert report.metrics["data/denominator_sequences"] == config.batch.size
