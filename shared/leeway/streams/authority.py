"""Authority of the trainer: what it writes counts only while it is the newest trainer of the run.

    the newest run epoch and its owner, a process, are in the hash `state`
    write   WATCH state -> is it another one's? -> yes: SupersededError, nothing is written
                                               -> no: MULTI effects EXEC; again if `state` has changed

The number alone does not decide: a server that loses its data counts from the beginning, and a trainer that
starts there may arrive at the number of one that still runs.

The controller has the same rule for its term (leeway_controller.store).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import redis

from leeway.errors import LeewayError
from leeway.streams.keys import EPOCH_FIELD, OWNER_FIELD, PUBLISHED_FIELD, Keys
from leeway.streams.retry import retrying

ATTEMPTS = 100


class SupersededError(LeewayError):
    """A newer start of the trainer owns the run."""

    def __init__(self, newest: int, own: int) -> None:
        where = "on a server that had lost its data " if newest == own else ""
        super().__init__(
            f"run epoch {newest} was started {where}while this trainer of epoch {own} was running; only the "
            "newest trainer continues"
        )


_process_id = uuid.uuid4().hex


def process_id() -> str:
    """Identifies this process among all that ever took part in a run."""
    return _process_id


class Start(NamedTuple):
    """What the server knows of the newest start of the trainer."""

    epoch: int
    """-1 if it knows none."""
    owner: str
    """The process that has begun the epoch."""
    published: str
    """The newest weight version, as <epoch>.<version>; "" before the first."""


def newest_start(client: Any, keys: Keys) -> Start:
    """The newest start of the trainer. Raises redis.RedisError."""
    epoch, *others = client.hmget(keys.state, EPOCH_FIELD, OWNER_FIELD, PUBLISHED_FIELD)
    owner, published = ("" if value is None else value.decode() for value in others)
    return Start(-1 if epoch is None else int(epoch), owner, published)


def newest_epoch(client: redis.Redis, keys: Keys, *, budget_s: float) -> int:
    """The newest run epoch; -1 if the server knows none. Raises RedisUnavailable."""
    return retrying(lambda: newest_start(client, keys).epoch, budget_s=budget_s, what="reading the run epoch")


def check_epoch(client: redis.Redis, keys: Keys, epoch: int, *, budget_s: float) -> Start:
    """The newest start: that of `epoch`, or an older one on a server that has lost data.

    Raises SupersededError if another trainer began it, RedisUnavailable.
    """
    found = retrying(lambda: newest_start(client, keys), budget_s=budget_s, what="reading the run epoch")
    _check_owner(found, epoch)
    return found


def _check_owner(found: Start, epoch: int) -> None:
    if found.epoch > epoch or (found.epoch == epoch and found.owner not in ("", process_id())):
        raise SupersededError(found.epoch, epoch)


def write_in_epoch(
    client: redis.Redis, keys: Keys, epoch: int, queue: Callable[[Any], Any], *, budget_s: float, what: str
) -> None:
    """Carry out the commands that `queue` puts on a pipeline, in one MULTI, as the trainer of `epoch`.

    Raises SupersededError, and RedisUnavailable after `budget_s` seconds. A MULTI whose reply was lost is
    repeated.
    """

    def execute() -> None:
        with client.pipeline(transaction=True) as pipe:
            for _ in range(ATTEMPTS):
                cast(Any, pipe).watch(keys.state)
                _check_owner(newest_start(pipe, keys), epoch)
                pipe.multi()
                queue(pipe)
                try:
                    pipe.execute()
                    return
                except redis.WatchError:
                    continue  # the controller has written its state
        raise redis.ConnectionError(f"the state changed during each of {ATTEMPTS} attempts")

    retrying(execute, budget_s=budget_s, what=what)
