"""Authority of the trainer: what it writes counts only while it is the newest trainer of the run.

    the newest run epoch is in the hash `state`
    write   WATCH state -> is the epoch above ours? -> yes: SupersededError, nothing is written
                                                   -> no: MULTI effects EXEC; again if `state` has changed

The controller has the same rule for its term (leeway_controller.store).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import redis

from leeway.errors import LeewayError
from leeway.streams.keys import EPOCH_FIELD, Keys
from leeway.streams.retry import retrying

ATTEMPTS = 100


class SupersededError(LeewayError):
    """A newer start of the trainer owns the run."""

    def __init__(self, newest: int, own: int) -> None:
        super().__init__(
            f"run epoch {newest} was started while this trainer of epoch {own} was running; only the newest "
            "trainer continues"
        )


def newest_epoch(client: redis.Redis, keys: Keys, *, budget_s: float) -> int:
    """The newest run epoch; -1 if the server knows none. Raises RedisUnavailable."""
    raw = retrying(
        lambda: client.hget(keys.state, EPOCH_FIELD), budget_s=budget_s, what="reading the run epoch"
    )
    return -1 if raw is None else int(cast(bytes, raw))


def check_epoch(client: redis.Redis, keys: Keys, epoch: int, *, budget_s: float) -> None:
    """Raise SupersededError if there is a newer run epoch than `epoch`."""
    newest = newest_epoch(client, keys, budget_s=budget_s)
    if newest > epoch:
        raise SupersededError(newest, epoch)


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
                newest = int(cast(Any, pipe.hget(keys.state, EPOCH_FIELD)) or -1)
                if newest > epoch:
                    raise SupersededError(newest, epoch)
                pipe.multi()
                queue(pipe)
                try:
                    pipe.execute()
                    return
                except redis.WatchError:
                    continue  # the controller has written its state
        raise redis.ConnectionError(f"the state changed during each of {ATTEMPTS} attempts")

    retrying(execute, budget_s=budget_s, what=what)
