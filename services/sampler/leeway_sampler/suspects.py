"""Tickets that were with dead samplers so often that one of them may be the cause.

begin   mark the ticket, then draw it with nothing else in progress
end     it was answered or is void -> the mark is removed
begin finds a mark   the sampler that drew the ticket alone died -> PoisonedTicketError ends the run
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
    """A ticket that kills every sampler that draws it."""

    exit_code = EXIT_POISONED


class Suspects:
    """The marks, in a hash of the run: ticket id -> the sampler that drew it alone, and a unique word."""

    def __init__(self, client: redis.Redis, keys: Keys, sampler: str, budget_s: float) -> None:
        self.client, self.keys, self.sampler, self.budget_s = client, keys, sampler, budget_s

    async def begin(self, header: TicketHeader, deliveries: int) -> None:
        """Mark a ticket that is about to be drawn alone; `deliveries`: how many times it was delivered.

        Raises PoisonedTicketError, and appends an event to the run, when the ticket has a mark already.
        """
        key, mark = self.keys.suspects, f"{self.sampler} {uuid.uuid4().hex}".encode()
        await self._call(lambda: self.client.hsetnx(key, header.ticket_id, mark))
        # Read back, because a write that is repeated after its reply was lost finds its own mark.
        if await self._call(lambda: self.client.hget(key, header.ticket_id)) != mark:
            raise await self._poisoned(header, deliveries)

    async def end(self, header: TicketHeader) -> None:
        """Remove the mark: the ticket was answered or is void."""
        await self._call(lambda: self.client.hdel(self.keys.suspects, header.ticket_id))

    async def _poisoned(self, header: TicketHeader, deliveries: int) -> PoisonedTicketError:
        text = (
            f"ticket {header.ticket_id} (item {header.item} of the data set, seed {header.seed}) was handed "
            f"out {deliveries - 1} times and each of its samplers died, the last one with nothing else in "
            "progress: find the cause in the samplers' logs, or remove the item from the data set"
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
