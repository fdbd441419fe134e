"""Who lost which ticket: samplers that died with it make it a suspect, and it is drawn alone.

The hash `suspects` has a mark for each holder (`leeway.incarnations`) that did not settle a ticket it had:

    lost    another sampler took it over, because its claim was not renewed
    alone   it is, or was, drawn with nothing else in progress; written before that begins
    cut     it was handed back unfinished; not a death

A holder may have died, or may have been stopped or cut off for a while, however long. As long as it is
silent, nobody can tell; it is dead once another process of its sampler has started, or its pod is gone.

    fewer than max_deliveries - 1 holders are dead or silent   drawn with others
    otherwise                                                  drawn alone
    a holder that drew it alone is dead    the ticket kills samplers: PoisonedTicketError ends the run

Whoever settles a ticket removes its marks in the same MULTI. What is left of older versions is removed by the
next reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis

from leeway.errors import EXIT_POISONED, LeewayError
from leeway.events import write_event
from leeway.incarnations import is_dead, read_incarnations, split_holder
from leeway.messages import TicketHeader
from leeway.statuses import read_statuses, split_live
from leeway.streams import Keys, now, retrying
from leeway.weights import VersionKey

LOST, ALONE, CUT = "lost", "alone", "cut"


class PoisonedTicketError(LeewayError):
    """A ticket that kills every sampler that draws it."""

    exit_code = EXIT_POISONED


@dataclass
class History:
    """What is known of one ticket. `marks`: holder -> kind of its mark."""

    marks: dict[str, str] = field(default_factory=dict)
    newest: Mapping[str, str] = field(default_factory=dict)
    """Sampler -> its newest incarnation."""
    beating: Collection[str] = ()
    """Samplers whose heartbeat is not overdue."""

    @property
    def deaths(self) -> list[str]:
        """Holders that died with the ticket."""
        return [holder for holder in self.marks if self._died(holder)]

    @property
    def missing(self) -> list[str]:
        """Holders that lost the ticket and are dead or silent."""
        return [
            holder
            for holder, kind in self.marks.items()
            if kind != CUT and (self._died(holder) or split_holder(holder)[0] not in self.beating)
        ]

    @property
    def killed_alone(self) -> list[str]:
        """Those of them that had nothing else in progress."""
        return [holder for holder, kind in self.marks.items() if kind == ALONE and self._died(holder)]

    def _died(self, holder: str) -> bool:
        return self.marks[holder] != CUT and is_dead(holder, self.newest)


def mark_field(ticket_id: str, holder: str) -> str:
    """Name of a mark in the hash."""
    return f"{ticket_id} {holder}"


def queue_mark(pipe: Any, keys: Keys, header: TicketHeader, holder: str, kind: str) -> None:
    """Queue a mark. One that a holder made itself before it lost the ticket is kept."""
    value = f"{kind} {header.epoch} {header.version}"
    (pipe.hsetnx if kind == LOST else pipe.hset)(keys.suspects, mark_field(header.ticket_id, holder), value)


class Suspects:
    """The marks of a run. `holder`: this sampler's process. `silence_s`: when a heartbeat is overdue."""

    def __init__(
        self, client: redis.Redis, keys: Keys, holder: str, *, silence_s: float, budget_s: float
    ) -> None:
        self.client, self.keys, self.holder = client, keys, holder
        self.silence_s, self.budget_s = silence_s, budget_s

    async def histories(self, tickets: Iterable[str], wanted: VersionKey) -> dict[str, History]:
        """The history of each ticket. Marks of versions below `wanted` are removed.

        Raises RedisUnavailable.
        """
        found = {ticket_id: History() for ticket_id in tickets}
        raw = await self._call(lambda: self.client.hgetall(self.keys.suspects))
        if not raw:
            return found
        newest, beating = await asyncio.to_thread(self._who_lives)
        old = []
        for name, value in raw.items():
            ticket_id, _, holder = name.decode().partition(" ")
            kind, epoch, version = value.decode().split(" ")
            if (int(epoch), int(version)) < wanted:
                old.append(name)
            elif ticket_id in found and holder != self.holder:
                found[ticket_id].marks[holder] = kind
                found[ticket_id].newest, found[ticket_id].beating = newest, beating
        if old:
            await self._call(lambda: self.client.hdel(self.keys.suspects, *old))
        return found

    def _who_lives(self) -> tuple[dict[str, str], set[str]]:
        """(sampler -> its newest incarnation, samplers whose heartbeat is not overdue)."""
        newest = read_incarnations(self.client, self.keys, budget_s=self.budget_s)
        statuses = read_statuses(self.client, self.keys, budget_s=self.budget_s)
        live, _ = split_live(statuses, now(), self.silence_s)
        return newest, {status.sampler for status in live}

    async def begin(self, header: TicketHeader, history: History) -> None:
        """Mark a ticket that is about to be drawn alone.

        Raises PoisonedTicketError, and appends an event to the run, when a holder that drew it alone is dead.
        """
        if history.killed_alone:
            raise await self._poisoned(header, history)
        await self._call(lambda: queue_mark(self.client, self.keys, header, self.holder, ALONE))

    async def leave(self) -> None:
        """This process ends in good order: what it lost before was not lost by a death."""
        raw = await self._call(lambda: self.client.hgetall(self.keys.suspects))
        own = [
            name
            for name, value in raw.items()
            if name.decode().endswith(f" {self.holder}") and not value.startswith(CUT.encode())
        ]
        if own:
            await self._call(lambda: self.client.hdel(self.keys.suspects, *own))

    async def _poisoned(self, header: TicketHeader, history: History) -> PoisonedTicketError:
        text = (
            f"ticket {header.ticket_id} (item {header.item} of the data set, seed {header.seed}) was with "
            f"{len(history.deaths)} samplers that died ({', '.join(history.deaths)}), the last one with "
            "nothing else in progress: find the cause in the samplers' logs, or remove the item from the "
            "data set"
        )
        await asyncio.to_thread(
            write_event,
            self.client,
            self.keys,
            level="error",
            source=self.holder.rpartition(":")[0],
            name="ticket_poisoned",
            text=text,
            budget_s=self.budget_s,
        )
        return PoisonedTicketError(text)

    async def _call(self, call: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(retrying, call, budget_s=self.budget_s, what="marking a ticket")
