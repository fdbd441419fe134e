"""Tickets that came back from dead samplers too often to be worked on beside others.

A sampler writes down that it begins such a ticket alone. A mark that is still there when the ticket comes
back means that the sampler died with nothing else in work: it was the ticket.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import redis

from leeway.errors import EXIT_POISONED, LeewayError
from leeway.events import write_event
from leeway.messages import TicketHeader
from leeway.streams import Keys, retrying


class PoisonedTicketError(LeewayError):
    """A ticket that kills whoever works on it."""

    exit_code = EXIT_POISONED


class Suspects:
    """The marks, in a hash of the run: ticket id -> the sampler that began it alone, and a unique word."""

    def __init__(self, client: redis.Redis, keys: Keys, sampler: str, budget_s: float) -> None:
        self.client, self.keys, self.sampler, self.budget_s = client, keys, sampler, budget_s

    async def begin(self, header: TicketHeader, delivered: int) -> None:
        """Mark a ticket that is drawn alone from now on, on its `delivered`-th delivery.

        Raises PoisonedTicketError, and tells the run, when it was marked before.
        """
        key, mark = self.keys.suspects, f"{self.sampler} {uuid.uuid4().hex}".encode()
        await self._call(lambda: self.client.hsetnx(key, header.ticket_id, mark))
        # Read back, because a repeated write whose first answer was lost finds its own mark.
        if await self._call(lambda: self.client.hget(key, header.ticket_id)) != mark:
            raise await self._poisoned(header, delivered)

    async def end(self, header: TicketHeader) -> None:
        """The ticket was answered, or is void: it is innocent."""
        await self._call(lambda: self.client.hdel(self.keys.suspects, header.ticket_id))

    async def _poisoned(self, header: TicketHeader, delivered: int) -> PoisonedTicketError:
        text = (
            f"ticket {header.ticket_id} (item {header.item} of the data set, seed {header.seed}) was handed "
            f"out {delivered - 1} times and each of its samplers died, the last one while it worked on "
            "nothing else: find the reason in the samplers' logs, or take the item out of the data set"
        )
        await asyncio.to_thread(
            write_event,
            self.client,
            self.keys,
            level="error",
            source=self.sampler,
            name="ticket_poisoned",
            text=text,
            budget_s=self.budget_s,
        )
        return PoisonedTicketError(text)

    async def _call(self, call: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(retrying, call, budget_s=self.budget_s, what="marking a ticket")
