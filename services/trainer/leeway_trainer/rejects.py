"""Rollouts that fail validation: moved aside, so that they end no start of the trainer.

    unreadable, or of a slot outside the plan
        of an older run epoch   -> moved to `rejected`; nothing waited for it
        otherwise               -> moved, and everything in flight is drawn again in a new run epoch: the same
                                   tickets, seeds and weights, so that the sample is not replaced by another
        for the third time in a row in the same batch -> the run ends

Moving and acknowledging are one MULTI.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import redis

from leeway.errors import EXIT_POISONED, LeewayError
from leeway.streams import Entry, Keys, add_fields, retrying, write_in_epoch

KEPT = 100
"""Rejected rollouts that are kept for inspection."""
ATTEMPTS = 3
"""How often a batch is drawn before the run ends because of its rejected rollouts."""


class RolloutsUnusable(LeewayError):
    """Rollouts of one batch were rejected each time that it was drawn."""

    exit_code = EXIT_POISONED


def of_older_epoch(fields: Mapping[bytes, bytes], epoch: int) -> bool:
    """Whether a rollout that cannot be used says that it is of an older run epoch than `epoch`."""
    try:
        found = json.loads(fields.get(b"h", b""))["epoch"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(found, int) and found < epoch


@dataclass(frozen=True)
class Note:
    """Why a rollout was rejected, by the trainer of `epoch` while it waited for `batch`."""

    epoch: int
    batch: int
    reason: str


def move_aside(
    client: redis.Redis,
    keys: Keys,
    entry: Entry,
    note: Note,
    queue_ack: Callable[[Any], None],
    *,
    budget_s: float,
) -> None:
    """Move a rollout to the stream `rejected`; `queue_ack` queues its acknowledgement.

    Raises SupersededError, RedisUnavailable.
    """
    fields = {name.encode(): str(value).encode() for name, value in asdict(note).items()}

    def move(pipe: Any) -> None:
        add_fields(pipe, keys.rejected, {**entry.fields, **fields}, KEPT)
        queue_ack(pipe)

    write_in_epoch(client, keys, note.epoch, move, budget_s=budget_s, what="moving a rejected rollout aside")


def check_attempts(client: redis.Redis, keys: Keys, batch: int, *, budget_s: float) -> None:
    """Raise RolloutsUnusable if the last rejected rollouts were of `batch`, in ATTEMPTS run epochs."""
    newest: Any = retrying(
        lambda: client.xrevrange(keys.rejected, count=KEPT),
        budget_s=budget_s,
        what="reading rejected rollouts",
    )
    epochs = set()
    for _, fields in newest:
        if int(fields[b"batch"]) != batch:
            break
        epochs.add(fields[b"epoch"])
    if len(epochs) >= ATTEMPTS:
        raise RolloutsUnusable(
            f"batch {batch} was drawn {len(epochs)} times, and each time a rollout was rejected: "
            f"{newest[0][1][b'reason'].decode()}; the rollouts are in the stream {keys.rejected}"
        )
