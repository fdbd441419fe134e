"""Rollouts that cannot be used or that somebody deleted: drawn again, and in the way of no later start."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import redis

from leeway.config.identity import identify
from leeway.config.load import build_config
from leeway.events import read_recent_events
from leeway.messages import Rollout, RolloutHeader, encode
from leeway.streams import EPOCH_FIELD, PUBLISHED_FIELD, ROLLOUTS_GROUP, Keys
from leeway_trainer.feed import Feed, StreamsLostError
from leeway_trainer.rejects import RolloutsUnusable

CONFIG = build_config({"task": {"kind": "digits"}, "batch": {"prompts": 1, "group_size": 2}})
DIGEST = identify(CONFIG).digest


def start(client: redis.Redis, keys: Keys) -> Feed:
    """What a start of the trainer does with its streams."""
    epoch = int(client.hincrby(keys.state, EPOCH_FIELD, 1))
    client.hset(keys.state, PUBLISHED_FIELD, f"{epoch}.1")
    client.xadd(keys.weights, {"version": 1})
    return Feed(client, keys, CONFIG, epoch=epoch, version=1, next_batch=0)


def fields(epoch: int, index: int, batch: int = 0) -> dict[Any, Any]:
    one, offsets = np.array([1], np.int32), np.array([0, 1], np.int32)
    logp = np.array([-1.0], np.float32)
    header = RolloutHeader(
        ticket_id=f"{epoch}.1.{batch}.0.{index}", epoch=epoch, version=1, batch=batch, group=0, index=index,
        item=0, sampler="s", finish_reason="stop", reward=1.0, spans=[(0, 1, 1)],
        config=DIGEST,
    )  # fmt: skip
    return encode(Rollout(header, one, one, logp, offsets, one, logp))


def poison(epoch: int) -> dict[Any, Any]:
    return {**fields(epoch, 0), b"a:logp": np.array([np.nan], np.float32).tobytes()}


def never() -> bool:
    return False


def test_a_poison_rollout_ends_no_start_of_the_trainer(client: redis.Redis, keys: Keys) -> None:
    feed = start(client, keys)
    client.xadd(keys.rollouts, poison(1))
    with pytest.raises(StreamsLostError, match=f"moved to {keys.rejected}.*drawn again"):
        feed.wait(never)
    assert client.xlen(keys.rollouts) == 0
    assert client.xpending(keys.rollouts, ROLLOUTS_GROUP)["pending"] == 0  # type: ignore[index]
    ((_, kept),) = client.xrange(keys.rejected)  # type: ignore[misc]
    assert {**poison(1)}.items() <= kept.items() and b"logp" in kept[b"reason"]
    assert "rollout_rejected" in [event.name for event in read_recent_events(client, keys, 60, budget_s=5)]
    again = start(client, keys)
    for index in (0, 1):
        client.xadd(keys.rollouts, fields(2, index))
    assert again.wait(never)
    assert [r.header.epoch for r in again.take()] == [2, 2]


def test_a_poison_rollout_of_an_older_epoch_is_in_nobodys_way(client: redis.Redis, keys: Keys) -> None:
    start(client, keys)
    feed = start(client, keys)
    client.xadd(keys.rollouts, poison(1))
    for index in (0, 1):
        client.xadd(keys.rollouts, fields(2, index))
    assert feed.wait(never)
    assert client.xlen(keys.rejected) == 1


def test_a_batch_that_is_rejected_each_time_ends_the_run(client: redis.Redis, keys: Keys) -> None:
    for epoch in (1, 2, 3):
        feed = start(client, keys)
        client.xadd(keys.rollouts, poison(epoch))
        client.xadd(keys.rollouts, poison(epoch))
        expected = RolloutsUnusable if epoch == 3 else StreamsLostError
        with pytest.raises(expected, match="logp"):
            feed.wait(never)


def test_rejected_rollouts_of_other_batches_do_not_count(client: redis.Redis, keys: Keys) -> None:
    for _ in range(3):
        feed = start(client, keys)
        client.xadd(keys.rollouts, poison(feed.epoch))
        with pytest.raises(StreamsLostError):
            feed.wait(never)
        feed = start(client, keys)
        for index in (0, 1):
            client.xadd(keys.rollouts, fields(feed.epoch, index))
        assert feed.wait(never) and feed.take()
        client.xadd(keys.rollouts, poison(feed.epoch))  # while batch 1 is awaited
        with pytest.raises(StreamsLostError):
            feed.wait(never)


@pytest.mark.parametrize("how", ["MAXLEN", "MINID", "XDEL"])
def test_rollouts_that_somebody_deleted_are_noticed(client: redis.Redis, keys: Keys, how: str) -> None:
    feed = start(client, keys)
    first: Any = client.xadd(keys.rollouts, fields(1, 0))
    if how == "MAXLEN":
        client.xadd(keys.rollouts, fields(1, 1), maxlen=1, approximate=False)
    elif how == "MINID":
        client.xadd(keys.rollouts, fields(1, 1), minid=b"%d-0" % (int(first.split(b"-")[0]) + 60_000))
    else:
        client.xdel(keys.rollouts, first)
    with pytest.raises(StreamsLostError, match="rollouts were deleted from .* by a client other"):
        feed.wait(never)
    assert "rollouts_deleted" in [event.name for event in read_recent_events(client, keys, 60, budget_s=5)]
    start(client, keys)._check_epoch()  # what was lost is of the epoch before


def test_what_the_trainer_deletes_itself_is_expected(client: redis.Redis, keys: Keys) -> None:
    feed = start(client, keys)
    client.xadd(keys.rollouts, fields(0, 0))  # void: acknowledged and deleted at once
    for batch in (0, 1):
        for index in (0, 1, 1):
            client.xadd(keys.rollouts, fields(1, index, batch))
        assert feed.wait(never)
        feed.take()
        feed.durable()
        feed._check_epoch()
    assert client.xlen(keys.rollouts) == 0
