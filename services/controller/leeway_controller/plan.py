"""The tickets of a batch: pure functions, so that a batch is fixed before anything is generated."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from leeway.batches import plan_batch, ticket_id
from leeway.errors import UsageError
from leeway.messages import Ticket, TicketHeader

__all__ = ["PromptError", "check_prompt", "plan_batch", "plan_tickets", "ticket_seed"]


class PromptError(UsageError):
    """A prompt that cannot be used; the message names the item of the data set."""


def ticket_seed(seed: int, batch: int, group: int, index: int) -> int:
    """Sampling seed of one response, in [0, 2^31): the same for every sampler and every attempt."""
    digest = hashlib.blake2b(f"{seed}/{batch}/{group}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**31


def check_prompt(ids: Sequence[int], item: int, max_new_tokens: int, max_length: int) -> None:
    """Raise PromptError if the prompt is empty, or prompt and response exceed the context length."""
    if not ids:
        raise PromptError(f"item {item} of the data set: the prompt is empty")
    if len(ids) + max_new_tokens > max_length:
        raise PromptError(
            f"item {item} of the data set: the prompt has {len(ids)} tokens; with "
            f"sampling.max_new_tokens={max_new_tokens} that exceeds model.max_length={max_length}"
        )


def plan_tickets(
    items: Sequence[int],
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    epoch: int,
    version: int,
    batch: int,
    group_size: int,
    max_new_tokens: int,
    config: str = "",
) -> list[Ticket]:
    """The tickets of one batch under one weight version; `prompts[g]` are the token ids of `items[g]`.

    `config`: digest of the configuration.
    """
    tickets = []
    for group, (item, ids) in enumerate(zip(items, prompts, strict=True)):
        for index in range(group_size):
            header = TicketHeader(
                ticket_id=ticket_id(epoch, version, batch, group, index),
                epoch=epoch,
                version=version,
                batch=batch,
                group=group,
                index=index,
                item=item,
                config=config,
                seed=ticket_seed(seed, batch, group, index),
                max_new_tokens=max_new_tokens,
            )
            tickets.append(Ticket(header, np.asarray(ids, dtype=np.int32)))
    return tickets
