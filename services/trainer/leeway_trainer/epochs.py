"""Run epochs: every start of the trainer, and every loss of the server's data, begins a new one.

The epoch is a counter in Redis. Everything on the wire carries it, so that nothing of an earlier epoch can be
mistaken for new. Beside it is the configuration of the epoch, which the trainer decides
(leeway.config.identity).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import redis

from leeway.config import RunConfig
from leeway.config.identity import Identity, identify
from leeway.streams import CONFIG_FIELD, EPOCH_FIELD, OWNER_FIELD, Keys, newest_start, process_id, retrying
from leeway.weights import latest_manifest
from leeway_trainer.feed import Feed
from leeway_trainer.ranks import Ranks


@dataclass(frozen=True)
class TrainerSetup:
    """Where a trainer runs: model directory, output directory, and (rank 0 only) the run's Redis."""

    model: str
    out: Path
    keys: Keys
    client: redis.Redis | None
    resume: Path | None = None
    """Checkpoint to resume from, or a directory that holds one."""


@dataclass(frozen=True)
class RunEpoch:
    """One run epoch: its number, the batch it began with, and rank 0's streams."""

    number: int
    first_batch: int
    feed: Feed | None


def begin_epoch(
    setup: TrainerSetup, config: RunConfig, ranks: Ranks, *, last: int, version: int, batch: int
) -> RunEpoch:
    """Count up the run epoch, above `last`, and open its streams; called by all ranks.

    `version`: the first weight version of the epoch; `batch`: the first batch.
    """
    client, keys = setup.client, setup.keys
    if client is None:
        return RunEpoch(ranks.share_int(0), batch, None)
    number = ranks.share_int(count_epoch(client, keys, last, identify(config), config.redis.reconnect_s))
    feed = Feed(client, keys, config, epoch=number, version=version, next_batch=batch)
    return RunEpoch(number, batch, feed)


def count_epoch(client: redis.Redis, keys: Keys, last: int, identity: Identity, budget_s: float) -> int:
    """Begin the next run epoch, which is above `last` even on a server that has never seen the run.

    It is also above that of every published version: a server that has lost the counter may still have some.
    Its number, its owner (this process) and the configuration are written together.
    """

    def count() -> int:
        newest = latest_manifest(client, keys)
        least = max(last, 0 if newest is None else newest.epoch)
        with client.pipeline(transaction=True) as pipe:
            while True:
                cast(Any, pipe).watch(keys.state)
                epoch = max(newest_start(pipe, keys).epoch, least) + 1
                fields: dict[Any, Any] = {
                    EPOCH_FIELD: str(epoch),
                    OWNER_FIELD: process_id(),
                    CONFIG_FIELD: identity.text,
                }
                pipe.multi()
                pipe.hset(keys.state, mapping=fields)
                try:
                    pipe.execute()
                    return epoch
                except redis.WatchError:
                    continue  # the controller has written its state

    return retrying(count, budget_s=budget_s, what="counting the run epoch")
