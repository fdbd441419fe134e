"""Did the server lose a part of the run, while the trainer waits for rollouts that will never come?

A ticket is in the stream until its rollout is: both change in one MULTI. So when the controller has written
the tickets of a batch, and later no ticket is left, all its rollouts are written. If they are not there
either, the server has lost tickets or rollouts (a failover, an eviction, a deleted key).
"""

from __future__ import annotations

import redis

from leeway.run_state import RunState
from leeway.streams import Keys, retrying
from leeway_trainer.assemble import BatchAssembler


def manifests_are_gone(client: redis.Redis, keys: Keys, budget_s: float) -> bool:
    """Whether no weight version is published any more, not even the newest. Raises RedisUnavailable."""
    return not retrying(lambda: client.xlen(keys.weights), budget_s=budget_s, what=f"counting {keys.weights}")


def is_overdue(
    client: redis.Redis, keys: Keys, state: RunState, awaited: BatchAssembler, budget_s: float
) -> bool:
    """Whether every ticket of the batch that `awaited` lacks rollouts of was written and answered.

    `state`: read before, because it was written together with the tickets. Raises RedisUnavailable.
    """
    issued = (
        (state.epoch, state.current) == (awaited.epoch, awaited.version)
        and state.pending is None
        and state.next_issue > awaited.batch
    )
    return issued and not retrying(
        lambda: client.xlen(keys.tickets), budget_s=budget_s, what=f"counting {keys.tickets}"
    )
