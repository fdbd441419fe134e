"""The loop over a server that is full, loses data or belongs to a newer trainer."""

from __future__ import annotations

import pytest
import torch
from other_side import OtherSide
from trainer_support import run_config, short_run

from leeway.messages import Event, decode
from leeway.streams import EPOCH_FIELD, SupersededError, Tail, connect
from leeway.weights import ChunkSource, HostCopy
from leeway_host.redis_server import EmbeddedRedis
from leeway_trainer.epochs import TrainerSetup
from leeway_trainer.train import Trainer


def test_without_room_the_run_continues_with_the_old_weights(
    tiny_dir, ranks, setup, client, keys, monkeypatch
):
    config = run_config(tiny_dir, trainer=short_run(steps=3), sync={"max_age": 1, "stall_timeout_s": 20.0})
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


def test_a_server_that_fills_up_gets_an_early_checkpoint(tiny_dir, ranks, tmp_path, keys):
    with EmbeddedRedis(maxmemory_mib=64) as server:
        client = connect(server.url)
        setup = TrainerSetup(str(tiny_dir), tmp_path / "run", keys, client)
        config = run_config(
            tiny_dir, trainer=short_run(steps=4, checkpoint_every=100), sync={"stall_timeout_s": 20.0}
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
    config = run_config(tiny_dir, trainer=short_run(steps=4), sync={"max_age": None, "stall_timeout_s": 20.0})
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
        tiny_dir, trainer=short_run(steps=2), sync={"max_age": None, "max_lead": 0, "verdict_timeout_s": 0.5}
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
    run = Trainer(run_config(tiny_dir, trainer=short_run()), ranks, setup)
    client.hincrby(keys.state, EPOCH_FIELD, 1)
    with pytest.raises(SupersededError, match="only the newest trainer continues"):
        run.run()
