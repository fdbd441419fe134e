"""What batch k consists of: its items, the ids of its tickets, and the digests that identify it once trained.

Pure functions: the controller plans with them, the trainer reports the digests, and `leeway chaos` compares
the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash
from numpy.typing import ArrayLike


def plan_batch(size: int, seed: int, batch: int, prompts: int) -> list[int]:
    """Items of batch `batch`: `prompts` indices into a data set of `size` items.

    Each pass over the data set uses a different permutation, so that no item repeats before all were used.
    Raises ValueError for sizes below 1 and a negative batch.
    """
    if size < 1 or prompts < 1 or batch < 0:
        raise ValueError(f"size={size} and prompts={prompts} must be positive, batch={batch} not negative")
    items: list[int] = []
    position = batch * prompts
    while len(items) < prompts:
        epoch, offset = divmod(position + len(items), size)
        order = np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(size)
        items += [int(i) for i in order[offset : offset + prompts - len(items)]]
    return items


def ticket_id(epoch: int, version: int, batch: int, group: int, index: int) -> str:
    """Id of the ticket for one slot of a batch under one weight version."""
    return f"{epoch}.{version}.{batch}.{group}.{index}"


def plan_ticket_ids(epoch: int, version: int, batch: int, groups: int, group_size: int) -> list[str]:
    """Ids of all tickets of a batch, in slot order."""
    return [ticket_id(epoch, version, batch, g, i) for g in range(groups) for i in range(group_size)]


def prompts_digest(prompts: Iterable[Sequence[int] | ArrayLike]) -> str:
    """Identifies the prompts of a batch, one per response, and their order (16 hex digits)."""
    state = xxhash.xxh3_64()
    for prompt in prompts:
        ids = np.ascontiguousarray(prompt, dtype="<i4")
        state.update(ids.size.to_bytes(4, "little"))
        state.update(ids.tobytes())
    return state.hexdigest()


def tickets_digest(ticket_ids: Iterable[str]) -> str:
    """Identifies the tickets of a batch and their order (16 hex digits)."""
    return xxhash.xxh3_64_hexdigest("\n".join(ticket_ids).encode())
