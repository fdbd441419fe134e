"""PendingTickets: tickets that Redis has delivered to this sampler and that are not acknowledged yet.

    read | claim_stale -> held, refreshed with every heartbeat
        publish     acknowledge + rollout                              -> answered
        void        acknowledge                                        -> its version is gone
        hand_back   acknowledge + a copy at the end of the stream      -> for another sampler

Each acknowledgement is in the same MULTI as its effect: a ticket is never lost and never answered without
being acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import redis

from leeway.messages import Rollout, encode
from leeway.streams import TICKETS_GROUP, Consumer, Entry, Keys, add_fields, retrying
from leeway.telemetry.tracing import messaging, span


class PendingTickets:
    """See the module's docstring. All methods belong to one event loop.

    Every method raises RedisUnavailable when Redis did not answer within `budget_s` seconds.
    """

    def __init__(self, client: redis.Redis, keys: Keys, sampler: str, budget_s: float) -> None:
        self.client, self.keys, self.budget_s = client, keys, budget_s
        self._consumer = Consumer(client, keys.tickets, TICKETS_GROUP, sampler, budget_s=budget_s)
        self._held: dict[bytes, Entry] = {}

    @property
    def held(self) -> list[Entry]:
        """Entries that are neither answered, void nor handed back."""
        return list(self._held.values())

    async def read(self, count: int, wait_s: float) -> list[Entry]:
        """Up to `count` new tickets; waits at most `wait_s` seconds for the first."""
        return self._hold(await asyncio.to_thread(self._consumer.read, count, wait_s))

    async def claim_stale(self, idle_s: float, count: int) -> list[Entry]:
        """Up to `count` tickets that other samplers have not refreshed for `idle_s` seconds."""
        return self._hold(await asyncio.to_thread(self._consumer.claim_stale, idle_s, count))

    def _hold(self, entries: list[Entry]) -> list[Entry]:
        self._held.update((entry.id, entry) for entry in entries)
        return entries

    async def deliveries(self, entries: Sequence[Entry]) -> dict[bytes, int]:
        """How many times each entry was delivered, this time included."""
        return await asyncio.to_thread(self._consumer.deliveries, entries)

    async def refresh(self) -> None:
        """Reset the idle time of what is held, so that no other sampler claims it."""
        await asyncio.to_thread(self._consumer.refresh, list(self._held))

    async def publish(self, entry: Entry, rollout: Rollout) -> None:
        """Answer a ticket with its rollout."""
        header = rollout.header
        what = f"publishing rollout {header.ticket_id}"
        attributes = messaging("send", self.keys.rollouts, header.ticket_id)
        with span("publish", attributes, kind="producer", parent=header.traceparent):
            fields = encode(rollout)
            await self._commit([entry], what, lambda pipe: add_fields(pipe, self.keys.rollouts, fields))

    async def void(self, entries: Sequence[Entry]) -> None:
        """Drop tickets whose version is gone."""
        if entries:
            await self._commit(entries, "acknowledging void tickets", lambda pipe: None)

    async def hand_back(self, entries: Sequence[Entry]) -> None:
        """Return tickets to the stream for any sampler."""

        def copies(pipe: Any) -> None:
            for entry in entries:
                add_fields(pipe, self.keys.tickets, entry.fields)

        await self._commit(entries, "handing tickets back", copies)

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
