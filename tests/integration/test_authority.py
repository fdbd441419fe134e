"""A trainer that was replaced changes nothing: neither rollouts, nor weights, nor checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import redis
import torch

from leeway.config.identity import identify
from leeway.config.load import build_config
from leeway.messages import Rollout, RolloutHeader
from leeway.streams import EPOCH_FIELD, Keys, SupersededError, append, newest_epoch, write_in_epoch
from leeway.weights import free_versions, latest_manifest, publish_weights, published_manifests
from leeway_trainer.feed import Feed


def publish(client: redis.Redis, keys: Keys, epoch: int, version: int, value: float = 0.0) -> None:
    tensors = [("w", torch.full((64,), value))]
    publish_weights(client, keys, epoch=epoch, version=version, step=0, tensors=tensors)


def everything(client: redis.Redis, keys: Keys) -> dict[bytes, bytes]:
    """All data of the run."""
    return {name: client.dump(name) for name in sorted(client.keys(keys.key("*")))}  # type: ignore[type-var]


def test_writes_count_while_the_epoch_is_the_newest(client: redis.Redis, keys: Keys) -> None:
    def write(epoch: int) -> None:
        write_in_epoch(client, keys, epoch, lambda pipe: pipe.incr(keys.key("x")), budget_s=5, what="writing")

    assert newest_epoch(client, keys, budget_s=5) == -1
    write(0)
    client.hset(keys.state, EPOCH_FIELD, 3)
    write(3)
    with pytest.raises(SupersededError, match="run epoch 3 was started while this trainer of epoch 2"):
        write(2)
    assert client.get(keys.key("x")) == b"2"


def test_an_epoch_that_begins_during_the_write_stops_it(client: redis.Redis, keys: Keys) -> None:
    client.hset(keys.state, EPOCH_FIELD, 1)
    rounds: list[int] = []

    def overtaken(pipe: redis.client.Pipeline) -> None:
        rounds.append(1)
        client.hincrby(keys.state, EPOCH_FIELD, 1)
        pipe.set(keys.key("x"), "1")

    with pytest.raises(SupersededError):
        write_in_epoch(client, keys, 1, overtaken, budget_s=5, what="writing")
    assert len(rounds) == 1
    assert not client.exists(keys.key("x"))


def test_other_changes_of_the_state_do_not_stop_a_write(client: redis.Redis, keys: Keys) -> None:
    rounds: list[int] = []

    def disturbed(pipe: redis.client.Pipeline) -> None:
        rounds.append(1)
        if len(rounds) < 4:
            client.hset(keys.state, "controller", str(len(rounds)))
        pipe.set(keys.key("x"), "1")

    write_in_epoch(client, keys, 0, disturbed, budget_s=5, what="writing")
    assert len(rounds) == 4
    assert client.get(keys.key("x")) == b"1"


CONFIG = build_config({"task": {"kind": "digits"}, "batch": {"prompts": 1, "group_size": 2}})


def feed(client: redis.Redis, keys: Keys, epoch: int) -> Feed:
    return Feed(client, keys, CONFIG, epoch=epoch, version=1, next_batch=0)


def rollouts(client: redis.Redis, keys: Keys, epoch: int) -> None:
    """Batch 0, drawn under version 1 of the epoch."""
    one, logp = np.array([1], np.int32), np.array([-1.0], np.float32)
    for index in range(2):
        header = RolloutHeader(
            ticket_id=f"{epoch}.1.0.0.{index}", epoch=epoch, version=1, batch=0, group=0, index=index, item=0,
            config=identify(CONFIG).digest,
            sampler="s", finish_reason="stop", reward=1.0, spans=[(0, 1, 1)],
        )  # fmt: skip
        offsets = np.array([0, 1], np.int32)
        append(client, keys.rollouts, Rollout(header, one, one, logp, offsets, one, logp))


Act = Callable[[redis.Redis, Keys, Feed], object]


@pytest.mark.parametrize(
    "act",
    [
        lambda c, k, f: f.durable(),
        lambda c, k, f: f.wait(lambda: False),
        lambda c, k, f: f.check_newest(),
        lambda c, k, f: publish(c, k, 1, 2),
        lambda c, k, f: free_versions(c, k, published_manifests(c, k)[:1], epoch=1),
    ],
    ids=["durable", "wait", "checkpoint", "publish", "free"],
)
def test_a_trainer_that_was_replaced_changes_nothing(client: redis.Redis, keys: Keys, act: Act) -> None:
    client.hset(keys.state, EPOCH_FIELD, 1)
    publish(client, keys, 1, 1)
    old = feed(client, keys, 1)
    rollouts(client, keys, 1)
    assert old.wait(lambda: False)
    old.take()  # trained, and not in a checkpoint yet
    client.hincrby(keys.state, EPOCH_FIELD, 1)
    publish(client, keys, 2, 1, value=1.0)
    rollouts(client, keys, 2)
    before = everything(client, keys)
    with pytest.raises(SupersededError):
        act(client, keys, old)
    assert everything(client, keys) == before


def test_chunks_of_an_older_trainer_lie_apart(client: redis.Redis, keys: Keys) -> None:
    client.hset(keys.state, EPOCH_FIELD, 1)
    publish(client, keys, 1, 4)
    client.hincrby(keys.state, EPOCH_FIELD, 1)
    publish(client, keys, 2, 5, value=1.0)
    chunks = client.dump(keys.weight_chunks(2, 5))
    with pytest.raises(SupersededError):
        publish(client, keys, 1, 5)  # its next version has the same number
    assert client.dump(keys.weight_chunks(2, 5)) == chunks
    assert free_versions(client, keys, [], epoch=1) == 0


def test_the_newest_version_is_the_highest_not_the_last(client: redis.Redis, keys: Keys) -> None:
    publish(client, keys, 1, 4)
    publish(client, keys, 2, 1)
    (_, fields), (_, other) = client.xrange(keys.weights)  # type: ignore[misc]
    client.delete(keys.weights)
    for late in (other, fields):
        client.xadd(keys.weights, late)
    newest = latest_manifest(client, keys)
    assert newest is not None and newest.key == (2, 1)


def test_the_checkpoint_of_a_replaced_trainer_stays_out_of_sight(tmp_path: Path) -> None:
    from leeway.checkpoints.state import TrainState
    from leeway_trainer.checkpoint import save_checkpoint
    from leeway_trainer.ranks import start_ranks

    class Engine:
        def save_checkpoint(self, path: str, **_: object) -> None:
            (Path(path) / "weights").write_text("x")

    class Policy:
        ranks, engine = start_ranks("cpu", 1, 60), Engine()

    state = TrainState(
        next_batch=4, version=1, published_at=0, epoch=1, ranks=1, zero_stage=0, dtype="float32", model="m"
    )
    save_checkpoint(tmp_path, Policy(), state, keep=1)  # type: ignore[arg-type]
    before = sorted(path.name for path in tmp_path.iterdir())

    def replaced() -> None:
        raise SupersededError(2, 1)

    with pytest.raises(SupersededError):
        save_checkpoint(tmp_path, Policy(), state.model_copy(update={"next_batch": 8}), 1, replaced)  # type: ignore[arg-type]
    assert [name for name in sorted(p.name for p in tmp_path.iterdir()) if not name.startswith(".")] == before
    assert (tmp_path / "latest").read_text().strip() == "step-000004"
