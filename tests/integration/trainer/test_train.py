"""The loop in this process, over a real server, with a made-up controller and sampler."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch
from other_side import OtherSide
from trainer_support import make_rollout, run_config

from leeway.checkpoints.find import find_checkpoint
from leeway.checkpoints.state import read_state
from leeway.errors import StalledError
from leeway.messages import Event, SamplerStatus, Verdict, VerdictHeader, decode
from leeway.statuses import write_status
from leeway.streams import EPOCH_FIELD, SupersededError, Tail, append, connect, now
from leeway.weights import ChunkSource, HostCopy
from leeway_host.redis_server import EmbeddedRedis
from leeway_trainer.epochs import TrainerSetup
from leeway_trainer.errors import StoppedError
from leeway_trainer.model import load_policy_model
from leeway_trainer.process import longest_wait_s
from leeway_trainer.train import Trainer


@pytest.fixture
def setup(tiny_dir, keys, client, tmp_path) -> TrainerSetup:
    return TrainerSetup(str(tiny_dir), tmp_path / "run", keys, client)


def trainer(**over):
    return {
        "dtype": "bfloat16",
        "device": "cpu",
        "learning_rate": 1e-3,
        "steps": 5,
        "checkpoint_every": 2,
    } | over


def test_a_run_from_start_to_end(tiny_dir, ranks, setup, client, keys):
    config = run_config(tiny_dir, trainer=trainer(), sync={"max_age": 2, "stall_timeout_s": 20.0})
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
    config = run_config(tiny_dir, trainer=trainer(steps=2), sync={"max_age": 1, "stall_timeout_s": 20.0})
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


def test_without_room_the_run_continues_with_the_old_weights(
    tiny_dir, ranks, setup, client, keys, monkeypatch
):
    config = run_config(tiny_dir, trainer=trainer(steps=3), sync={"max_age": 1, "stall_timeout_s": 20.0})
    with OtherSide(client, keys, config) as other:
        run = Trainer(config, ranks, setup)
        start = run.versions.start

        def then_full() -> None:
            start()
            monkeypatch.setattr("leeway_trainer.transports.kinds.redis.room_for", lambda *_, **__: 1000)

        run.versions.start = then_full
        run.run()
        other.wait_for(lambda: other.reports[-1].event == "finished")
    assert [m.version for m in other.manifests] == [0]
    assert [(r.event, r.step, r.version) for r in other.reports] == [
        ("started", 0, 0),
        ("step", 0, 0),
        ("resync_failed", 1, 0),
        ("step", 1, 0),
        ("resync_failed", 2, 0),
        ("step", 2, 0),
        ("finished", 3, 0),
    ]
    assert [r.metrics["lag/age"] for r in other.steps()] == [0, 1, 2]
    assert other.steps()[2].metrics["lag/ess_tok"] < 1, "theta_s is still what samplers hold"
    texts = [decode(Event, e.fields).header.text for e in Tail(client, keys.events).read(block_s=None)]
    assert "samplers keep version 0: new weights" in texts[0]
    assert "(1000 bytes; weights.max_redis_mib=None" in texts[0]


def test_a_keyframe_is_sent_when_a_sampler_is_stuck(tiny_dir, ranks, setup, client, keys):
    config = run_config(tiny_dir, trainer=trainer(steps=2), sync={"max_age": None, "stall_timeout_s": 20.0})
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
        trainer=trainer(steps=3),
        sync={"max_age": 1, "verdict_timeout_s": 0.2, "stall_timeout_s": 20.0},
    )
    with OtherSide(client, keys, config, verdicts=False) as other:
        Trainer(config, ranks, setup).run()
        other.wait_for(lambda: other.reports[-1].event == "finished")
    assert [m.version for m in other.manifests] == [0, 1, 2]
    assert [r.metrics["verdict/self"] for r in other.steps()] == [0, 1, 1], "part of the next report"


def test_a_late_resync_is_done_while_waiting(tiny_dir, ranks, setup, client, keys):
    config = run_config(tiny_dir, trainer=trainer(steps=2), sync={"max_age": None, "stall_timeout_s": 20.0})
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

    config = run_config(tiny_dir, trainer=trainer(steps=2), sync={"stall_timeout_s": 20.0})
    with OtherSide(client, keys, config, edit=noisy) as other:
        Trainer(config, ranks, setup).run()
        other.wait_for(lambda: other.reports[-1].event == "finished")
    assert all(r.metrics["reward/mean"] <= 1 for r in other.steps())
    tokens = sum(r.metrics["tokens"] for r in other.steps())
    assert sum(r.metrics["tokens/voided"] for r in other.steps()) == pytest.approx(tokens, abs=12)


def test_rollouts_stay_until_a_checkpoint_holds_them(tiny_dir, ranks, setup, client, keys):
    config = run_config(
        tiny_dir, trainer=trainer(steps=4, checkpoint_every=3), sync={"stall_timeout_s": 20.0}
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
    config = run_config(tiny_dir, trainer=trainer(steps=5), sync={"max_age": 2, "stall_timeout_s": 20.0})
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


def test_a_stall_names_the_slots(tiny_dir, ranks, setup, client, keys):
    config = run_config(
        tiny_dir,
        trainer=trainer(steps=2),
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


def test_a_server_that_fills_up_gets_an_early_checkpoint(tiny_dir, ranks, tmp_path, keys):
    with EmbeddedRedis(maxmemory_mib=64) as server:
        client = connect(server.url)
        setup = TrainerSetup(str(tiny_dir), tmp_path / "run", keys, client)
        config = run_config(
            tiny_dir, trainer=trainer(steps=4, checkpoint_every=100), sync={"stall_timeout_s": 20.0}
        )
        with OtherSide(client, keys, config) as other:
            run = Trainer(config, ranks, setup)
            original, pending = run.durability.save_if_due, []

            def fill_after_two(*arguments) -> None:
                if run.next_batch == 2:
                    client.config_set("maxmemory", int(client.info("memory")["used_memory"] / 0.8))
                elif run.next_batch == 3:
                    client.config_set("maxmemory", 64 << 20)
                original(*arguments)
                pending.append(client.xpending(keys.rollouts, "trainer")["pending"])

            run.durability.save_if_due = fill_after_two
            run.run()
            other.wait_for(lambda: other.reports[-1].event == "finished")
        saved = sorted(p.name for p in (setup.out / "checkpoints").glob("step-*"))
        assert saved == ["step-000002", "step-000004"]
        assert pending[0] >= 6 and pending[1] < pending[0], "rollouts in the checkpoint are deleted"
        fractions = [r.metrics.get("redis/memory_fraction", 0) for r in other.steps()]
        assert fractions[2] == pytest.approx(0.8, abs=0.1), "part of the next report"
        client.close()


def test_a_server_that_lost_everything_gets_a_new_epoch_of_the_same_policy(
    tiny_dir, ranks, setup, client, keys
):
    config = run_config(tiny_dir, trainer=trainer(steps=4), sync={"max_age": None, "stall_timeout_s": 20.0})
    with OtherSide(client, keys, config) as other:
        run = Trainer(config, ranks, setup)
        original, theta = run.durability.save_if_due, {}

        def lose_after_two(*arguments) -> None:
            original(*arguments)
            if run.next_batch == 2 and not theta:
                other.wait_for(lambda: len(other.steps()) == 2)
                client.flushall()
                theta.update(
                    {n: p.detach().bfloat16().clone() for n, p in run.policy.model.lm.named_parameters()}
                )

        run.durability.save_if_due = lose_after_two
        run.run()
        other.wait_for(lambda: other.reports[-1].event == "finished")
    assert [(r.event, r.step, r.epoch - run.epoch.number) for r in other.reports] == [
        ("started", 0, -1),
        ("step", 0, -1),
        ("step", 1, -1),
        ("step", 1, -1),  # repeated, because it may have been lost; readers drop it
        ("started", 2, 0),
        ("step", 2, 0),
        ("step", 3, 0),
        ("finished", 4, 0),
    ]
    copy = HostCopy()
    copy.advance(ChunkSource(client), keys, other.manifests[-1:])
    sent = copy.tensors()
    assert all(torch.equal(sent[name], tensor) for name, tensor in theta.items()), "nothing was unlearned"
    events = [decode(Event, fields).header for _, fields in client.xrange(keys.events)]
    assert [e.name for e in events] == ["streams_lost"]
    assert "batch 2 is generated again" in events[0].text


class LosesFirst(OtherSide):
    """Never sees the first report of step 0: the server lost it in a failover."""

    lost = False

    def _on_report(self, report) -> None:
        if report.event == "step" and not self.lost:
            self.lost = True
            return
        super()._on_report(report)


def test_a_report_that_the_server_lost_is_written_again(tiny_dir, ranks, setup, client, keys):
    config = run_config(
        tiny_dir, trainer=trainer(steps=2), sync={"max_age": None, "max_lead": 0, "verdict_timeout_s": 0.5}
    )
    with LosesFirst(client, keys, config) as other:
        Trainer(config, ranks, setup).run()
        other.wait_for(lambda: other.reports[-1].event == "finished")
    assert [(r.event, r.step) for r in other.reports if r.event != "started"] == [
        ("step", 0),
        ("step", 1),
        ("finished", 2),
    ]


def test_a_trainer_that_was_replaced_ends(tiny_dir, ranks, setup, client, keys):
    run = Trainer(run_config(tiny_dir, trainer=trainer()), ranks, setup)
    client.hincrby(keys.state, EPOCH_FIELD, 1)
    with pytest.raises(SupersededError, match="only the newest trainer continues"):
        run.run()


def test_stop_ends_the_wait_at_once(tiny_dir, ranks, setup):
    run = Trainer(run_config(tiny_dir, trainer=trainer()), ranks, setup)
    run.stopping = True
    with pytest.raises(StoppedError, match="while waiting for rollouts"):
        run.run()


def test_made_up_rollouts_are_valid():
    from leeway.messages import Rollout, decode, encode

    rollout = make_rollout(3, 1, 2, complete=True)
    assert decode(Rollout, encode(rollout)).header == rollout.header


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_first_fresh_batch_is_scored_with_the_old_weights_too(
    tiny_dir, ranks, setup, client, keys, dtype
):
    config = run_config(
        tiny_dir,
        trainer=trainer(steps=6, dtype=dtype, learning_rate=1e-2),
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


def test_a_loop_that_waits_is_alive_and_one_that_hangs_is_not(
    tiny_dir, ranks, setup, client, keys, monkeypatch
):
    config = run_config(tiny_dir, trainer=trainer(steps=1), sync={"stall_timeout_s": 60.0})
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
