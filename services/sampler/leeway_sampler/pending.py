"""PendingTickets: tickets that Redis has delivered to this sampler and that are not acknowledged yet.

    read | take_over -> held; the claim is renewed while the engine draws tokens
        publish     acknowledge + rollout                              -> answered
        void        acknowledge                                        -> its version is gone
        hand_back   acknowledge + a copy at the end of the stream      -> for another sampler

Each acknowledgement is in the same MULTI as its effect: a ticket is never lost and never answered without
being acknowledged. The consumer is this process, not the sampler, so that it is known whose claim ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis

from leeway.incarnations import is_dead, read_incarnations, split_holder
from leeway.messages import MessageError, Rollout, Ticket, TicketHeader, decode, encode
from leeway.streams import TICKETS_GROUP, Consumer, Entry, Keys, Stale, add_fields, retrying
from leeway.telemetry.tracing import messaging, span
from leeway_sampler.suspects import CUT, LOST, History, mark_field, queue_mark


class PendingTickets:
    """See the module's docstring. All methods belong to one event loop. `holder`: this process.

    Every method raises RedisUnavailable when Redis did not answer within `budget_s` seconds.
    """

    def __init__(self, client: redis.Redis, keys: Keys, holder: str, budget_s: float) -> None:
        self.client, self.keys, self.holder, self.budget_s = client, keys, holder, budget_s
        self._consumer = Consumer(client, keys.tickets, TICKETS_GROUP, holder, budget_s=budget_s)
        self._held: dict[bytes, Entry] = {}
        self._renewed_at = time.monotonic()

    @property
    def held(self) -> list[Entry]:
        """Entries that are neither answered, void nor handed back."""
        return list(self._held.values())

    async def read(self, count: int, wait_s: float) -> list[Entry]:
        """Up to `count` new tickets; waits at most `wait_s` seconds for the first."""
        return self._hold(await asyncio.to_thread(self._consumer.read, count, wait_s))

    async def take_over(self, idle_s: float, count: int) -> list[Entry]:
        """Up to `count` tickets whose claim was not renewed for `idle_s` seconds; who lost them is noted."""
        return self._hold(await asyncio.to_thread(self._take_over, idle_s, count))

    def _take_over(self, idle_s: float, count: int) -> list[Entry]:
        stale = self._consumer.find_stale(idle_s, count)
        if not stale:
            return []
        owners = {entry.id: entry.owner for entry in stale}
        headers = {entry.id: _header(entry) for entry in self._consumer.look(list(owners))}

        def note(pipe: Any) -> None:
            for entry_id, header in headers.items():
                if header is not None:
                    queue_mark(pipe, self.keys, header, owners[entry_id], LOST)

        self._consumer.ack([entry_id for entry_id in owners if entry_id not in headers])  # deleted meanwhile
        entries = self._consumer.claim(list(headers), idle_s, note) if headers else []
        self._remove_dead(stale)
        return entries

    def _remove_dead(self, stale: Sequence[Stale]) -> None:
        """Remove the consumers of dead processes that have no tickets left."""
        newest = read_incarnations(self.client, self.keys, budget_s=self.budget_s)
        for owner in {entry.owner for entry in stale}:
            if is_dead(owner, newest):
                self._consumer.remove(owner)

    def _hold(self, entries: list[Entry]) -> list[Entry]:
        self._held.update((entry.id, entry) for entry in entries)
        return entries

    async def renew(self, idle_s: float) -> None:
        """Renew the claim on what is held, so that no other sampler takes it over.

        What was taken over is not held any more, which can only be after `idle_s` seconds without renewal.
        """
        if time.monotonic() - self._renewed_at > idle_s:
            await self.drop_lost()
        self._renewed_at = time.monotonic()
        await asyncio.to_thread(self._consumer.refresh, list(self._held))

    async def drop_lost(self) -> None:
        """Forget tickets that other samplers have taken over."""
        owned = await asyncio.to_thread(self._consumer.owned)
        for entry_id in [entry_id for entry_id in self._held if entry_id not in owned]:
            del self._held[entry_id]

    def holds(self, entry: Entry) -> bool:
        """Whether the ticket is still this sampler's."""
        return entry.id in self._held

    async def publish(self, entry: Entry, rollout: Rollout, history: History) -> None:
        """Answer a ticket with its rollout."""
        header = rollout.header
        what = f"publishing rollout {header.ticket_id}"
        attributes = messaging("send", self.keys.rollouts, header.ticket_id)
        with span("publish", attributes, kind="producer", parent=header.traceparent):
            fields = encode(rollout)

            def effects(pipe: Any) -> None:
                add_fields(pipe, self.keys.rollouts, fields)
                marks = [self.holder, *history.marks]
                pipe.hdel(self.keys.suspects, *(mark_field(header.ticket_id, holder) for holder in marks))

            await self._commit([entry], what, effects)

    async def void(self, entries: Sequence[Entry]) -> None:
        """Drop tickets whose version is gone."""
        if entries:
            await self._commit(entries, "acknowledging void tickets", lambda pipe: None)

    async def hand_back(self, entries: Sequence[Entry], *, cut: bool = False) -> None:
        """Return tickets to the stream for any sampler. `cut`: their responses were begun."""
        entries = [entry for entry in entries if self.holds(entry)]
        if not entries:
            return

        def copies(pipe: Any) -> None:
            for entry in entries:
                add_fields(pipe, self.keys.tickets, entry.fields)
                header = _header(entry)
                if cut and header is not None:
                    queue_mark(pipe, self.keys, header, self.holder, CUT)

        await self._commit(entries, "handing tickets back", copies)

    async def leave(self) -> None:
        """All tickets are settled: remove this consumer, and those of earlier processes of the sampler."""
        await asyncio.to_thread(self._leave)

    def _leave(self) -> None:
        sampler, _ = split_holder(self.holder)
        for name in [self.holder, *self._consumer.others()]:
            if split_holder(name)[0] == sampler:
                self._consumer.remove(name)

    async def _commit(self, entries: Sequence[Entry], what: str, effects: Callable[[Any], Any]) -> None:
        """`effects` and the acknowledgement of `entries`, all or nothing."""
        ids = [entry.id for entry in entries]

        def execute() -> None:
            with self.client.pipeline(transaction=True) as pipe:
                effects(pipe)
                self._consumer.queue_ack(pipe, ids)
                pipe.execute()

        await asyncio.to_thread(retrying, execute, budget_s=self.budget_s, what=what)
        self._consumer.forget(ids)
        for entry_id in ids:
            self._held.pop(entry_id, None)


def _header(entry: Entry) -> TicketHeader | None:
    """The header of a ticket; None if it cannot be read, which whoever draws it will find out."""
    try:
        return decode(Ticket, entry.fields).header
    except MessageError:
        return None
