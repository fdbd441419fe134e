"""The trainer on a server that has lost a part of the run, and beside another that began the same epoch."""

from __future__ import annotations

import numpy as np
import pytest
import redis
import torch
from redis.backoff import NoBackoff
from redis.retry import Retry

import leeway.streams.authority as authority
from leeway.config.identity import identify
from leeway.config.load import build_config
from leeway.errors import StalledError
from leeway.messages import Rollout, RolloutHeader
from leeway.run_state import RunState
from leeway.streams import ROLLOUTS_GROUP, STATE_FIELD, Keys, SupersededError, Tail, append
from leeway.weights import parse_manifest, publish_weights
from leeway_trainer.epochs import count_epoch
from leeway_trainer.feed import Feed, StreamsLostError

CONFIG = build_config(
    {
        "task": {"kind": "digits"},
        "batch": {"prompts": 1, "group_size": 2},
        "sync": {"stall_timeout_s": 5},
        "sampler": {"start_timeout_s": 5},
    }
)

IDENTITY = identify(CONFIG)


def publish(client: redis.Redis, keys: Keys, epoch: int, version: int) -> None:
    publish_weights(client, keys, epoch=epoch, version=version, step=0, tensors=[("w", torch.zeros(4))])


def answer(client: redis.Redis, keys: Keys, epoch: int, index: int) -> None:
    one, logp = np.array([1], np.int32), np.array([-1.0], np.float32)
    header = RolloutHeader(
        ticket_id=f"{epoch}.1.0.0.{index}", epoch=epoch, version=1, batch=0, group=0, index=index, item=0,
        config=IDENTITY.digest, sampler="s", finish_reason="stop", reward=1.0, spans=[(0, 1, 1)],
    )  # fmt: skip
    append(client, keys.rollouts, Rollout(header, one, one, logp, np.array([0, 1], np.int32), one, logp))


@pytest.fixture
def feed(client: redis.Redis, keys: Keys) -> Feed:
    """The trainer waits for batch 0 of version 1, whose two tickets the controller has written."""
    epoch = count_epoch(client, keys, -1, IDENTITY, 5.0)
    publish(client, keys, epoch, 1)
    state = RunState(epoch=epoch, current=1, next_step=0, next_issue=1)
    client.hset(keys.state, STATE_FIELD, state.model_dump_json())
    return Feed(client, keys, CONFIG, epoch=epoch, version=1, next_batch=0)


def test_a_batch_whose_tickets_and_rollouts_are_gone_is_drawn_again(
    client: redis.Redis, keys: Keys, feed: Feed
) -> None:
    answer(client, keys, feed.epoch, 0)  # and the other one was lost
    with pytest.raises(StreamsLostError, match="1 of batch 0: 0/1 .*: neither tickets nor rollouts are left"):
        feed.wait(lambda: False)


def test_a_ticket_in_progress_is_waited_for(client: redis.Redis, keys: Keys, feed: Feed) -> None:
    answer(client, keys, feed.epoch, 0)
    client.xadd(keys.tickets, {"h": "x"})
    with pytest.raises(StalledError):
        feed.wait(lambda: False)


def test_rollouts_whose_delivery_came_too_late_are_found(client: redis.Redis, keys: Keys, feed: Feed) -> None:
    """A read that had been given up arrives at the server after the trainer looked for what it left."""
    assert feed._read(0).entries == 0
    for index in range(2):
        answer(client, keys, feed.epoch, index)
    client.xreadgroup(ROLLOUTS_GROUP, "trainer", {keys.rollouts: ">"}, count=64)
    assert feed.wait(lambda: False)


def test_a_lost_manifest_is_noticed(client: redis.Redis, keys: Keys, feed: Feed) -> None:
    dump = client.dump(keys.state)
    publish(client, keys, feed.epoch, 2)
    feed.renew(2)
    client.restore(keys.state, 0, dump, replace=True)  # type: ignore[arg-type]  # a failover to an older copy
    with pytest.raises(StreamsLostError, match="does not know weights version 2"):
        feed.wait(lambda: False)


def test_a_lost_stream_of_manifests_is_noticed(client: redis.Redis, keys: Keys, feed: Feed) -> None:
    client.delete(keys.weights)
    client.xadd(keys.tickets, {"h": "x"})
    with pytest.raises(StreamsLostError, match="lost the manifest of weights version 1"):
        feed.wait(lambda: False)


def test_a_controller_that_began_again_is_told_of_a_new_epoch(
    client: redis.Redis, keys: Keys, feed: Feed
) -> None:
    client.xadd(keys.tickets, {"h": "x"})
    looks: list[int] = []

    def begin_again() -> bool:
        looks.append(1)
        if len(looks) == 3:
            client.hset(keys.state, STATE_FIELD, RunState().model_dump_json())
        return False

    with pytest.raises(StreamsLostError, match="the controller has begun again"):
        feed.wait(begin_again)


def test_two_trainers_that_counted_the_same_epoch_are_told_apart(
    client: redis.Redis, keys: Keys, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.flushall()
    monkeypatch.setattr(authority, "_process_id", "another process")
    assert count_epoch(client, keys, -1, IDENTITY, 5.0) == feed.epoch
    publish(client, keys, feed.epoch, 1)
    monkeypatch.undo()
    answer(client, keys, feed.epoch, 0)
    with pytest.raises(SupersededError, match="on a server that had lost its data"):
        feed.wait(lambda: False)
    with pytest.raises(SupersededError):
        publish(client, keys, feed.epoch, 2)


def test_a_lost_counter_does_not_lead_to_the_epoch_of_a_version_that_is_still_published(
    client: redis.Redis, keys: Keys, feed: Feed
) -> None:
    publish(client, keys, feed.epoch, 2)
    client.delete(keys.state)
    assert count_epoch(client, keys, -1, IDENTITY, 5.0) == feed.epoch + 1


def test_manifests_are_in_order_whatever_the_server_clock_says(client: redis.Redis, keys: Keys) -> None:
    tail = Tail(client, keys.weights)
    publish(client, keys, 1, 7)
    assert len(tail.read(block_s=None)) == 1
    client.delete(keys.weights)
    publish(client, keys, 2, 0)
    assert [parse_manifest(entry.fields).key for entry in tail.read(block_s=None)] == [(2, 0)]
    ids = [entry_id for entry_id, _ in client.xrange(keys.weights)]  # type: ignore[union-attr]
    assert ids == [b"2-1"], "an id by the server's clock may be below what readers have read"


class LosesOne(redis.Connection):
    """Loses the connection at the next of some commands."""

    lose: tuple[str, ...] = ()

    def send_command(self, *args: object, **kwargs: object) -> None:
        if args[0] in LosesOne.lose:
            LosesOne.lose = ()
            self.disconnect()
            raise redis.ConnectionError("Connection reset by peer")
        super().send_command(*args, **kwargs)


@pytest.fixture
def fragile(client: redis.Redis) -> redis.Redis:
    """A client without retries of its own."""
    settings = {**client.connection_pool.connection_kwargs, "retry": Retry(NoBackoff(), 0)}
    return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=LosesOne, **settings))


@pytest.mark.parametrize("commands", [("HGET", "HMGET"), ("XRANGE",), ("UNLINK",)], ids="/".join)
def test_a_connection_lost_during_a_publication_is_made_up_for(
    client: redis.Redis, fragile: redis.Redis, keys: Keys, commands: tuple[str, ...]
) -> None:
    """HGET and HMGET come after WATCH, where redis-py reports a lost connection as a WatchError."""
    LosesOne.lose = commands
    publish(fragile, keys, 1, 0)
    assert LosesOne.lose == ()
    assert client.xlen(keys.weights) == 1
