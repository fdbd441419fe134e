"""TicketWorker: what becomes of the tickets that a sampler reads.

    accept -> triage: serve   its version is loaded: one task per ticket
                      alone   it outlived its samplers too often: nothing else in progress beside it
                      void    its version is gone
                      return  another sampler is ahead of this one, or this one is draining
                              the ticket is of another configuration

    serve      waits for                                       unblocked by
    generate   the engine's response, of one version alone     vLLM; aborted by new weights, a fence or drain
    score      the reward                                      the reward pool
    publish    rollout and acknowledgement, in one MULTI       Redis

Before it publishes, `serve` checks again that the version is still wanted and that there is no fence.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from leeway.config import RunConfig
from leeway.config.identity import Identity
from leeway.messages import Ticket, TicketHeader, decode
from leeway.rewards import RewardPool, RewardResult
from leeway.streams import Entry
from leeway.telemetry.tracing import span
from leeway.weights import VersionKey
from leeway_sampler import metrics
from leeway_sampler.engine import EngineError, GenerationAborted, SamplerEngine
from leeway_sampler.generation import Generation, LogProbError
from leeway_sampler.pending import PendingTickets
from leeway_sampler.probe import Prober
from leeway_sampler.rollouts import build_rollout, generate_span, generation_attributes
from leeway_sampler.status import Counters
from leeway_sampler.suspects import History, Suspects
from leeway_sampler.watch import WeightWatcher

log = logging.getLogger(__name__)

SETTLE_S = 0.5
"""Seconds between two looks at the work in progress, and after tickets were handed back."""
ATTEMPTS = 3
"""Responses drawn for a ticket before giving up: one counts only if its version alone drew all of it."""


class Fate(Enum):
    """What to do with a ticket."""

    SERVE = "serve"
    ALONE = "alone"
    VOID = "void"
    RETURN = "return"


def triage(
    key: VersionKey, wanted: VersionKey, *, ready: bool, own: bool, losses: int, max_deliveries: int
) -> Fate:
    """The fate of a ticket of version `key` where `wanted` is the newest version known to this sampler.

    `ready`: `wanted` is loaded and the sampler takes tickets. `own`: the ticket is of this sampler's
    configuration. `losses`: processes that lost it and are dead or silent.
    """
    if key < wanted:
        return Fate.VOID
    if key > wanted or not ready or not own:
        return Fate.RETURN
    return Fate.SERVE if losses < max_deliveries - 1 else Fate.ALONE


@dataclass
class TicketWorker:
    """See the module's docstring. All methods belong to one event loop."""

    config: RunConfig
    name: str
    """Name of the sampler."""
    engine: SamplerEngine
    rewards: RewardPool
    identity: Identity
    """Of the sampler's configuration."""
    decode_text: Callable[[list[int]], str]
    """Response ids to the text that is scored."""
    pending: PendingTickets
    watcher: WeightWatcher
    prober: Prober
    suspects: Suspects
    counters: Counters
    stopping: asyncio.Event
    report: Callable[[str], Awaitable[None]]
    """Called with what is wrong with the engine, before the error is raised."""
    tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    """Work in progress."""
    failed: asyncio.Future[None] = field(init=False)
    """Has the first exception of a task."""

    def __post_init__(self) -> None:
        self._accepting = asyncio.Lock()
        self.failed = asyncio.get_running_loop().create_future()

    @property
    def ready(self) -> bool:
        """Whether the newest version is loaded and tickets are taken."""
        return self.watcher.ready.is_set() and not self.stopping.is_set()

    # -- accept ------------------------------------------------------------------------------------------

    async def accept(self, entries: Sequence[Entry]) -> None:
        """Start on each ticket, or settle it. Returns when those to be served alone have been served."""
        async with self._accepting:
            tickets = {entry.id: decode(Ticket, entry.fields) for entry in entries}
            histories = await self.suspects.histories(
                (ticket.header.ticket_id for ticket in tickets.values()), self.watcher.wanted
            )
            of = {entry_id: histories[ticket.header.ticket_id] for entry_id, ticket in tickets.items()}
            fates: dict[Fate, list[Entry]] = {fate: [] for fate in Fate}
            for entry in entries:
                fates[self._triage(tickets[entry.id].header, of[entry.id])].append(entry)
            for entry in fates[Fate.SERVE]:
                self.spawn(self._serve(entry, tickets[entry.id], of[entry.id]))
                if self.prober.due(tickets[entry.id].prompt_ids):
                    self.spawn(self.prober.run())
            await self._void(fates[Fate.VOID])
            if fates[Fate.RETURN]:
                await self.pending.hand_back(fates[Fate.RETURN])
                await self.pause(SETTLE_S)  # for whoever is ahead to read them
            for entry in fates[Fate.ALONE]:
                await self._serve_alone(entry, tickets[entry.id], of[entry.id])

    def _triage(self, header: TicketHeader, history: History) -> Fate:
        return triage(
            (header.epoch, header.version),
            self.watcher.wanted,
            ready=self.ready,
            own=header.config == self.identity.digest,
            losses=len(history.missing),
            max_deliveries=self.config.sampler.max_deliveries,
        )

    async def _serve_alone(self, entry: Entry, ticket: Ticket, history: History) -> None:
        """Serve a ticket with nothing else in progress: if this sampler dies too, the ticket is the cause."""
        await self.settled()
        if self.stopping.is_set():
            return  # drain hands it back
        log.warning("ticket %s was lost by %s: it is drawn alone", ticket.header.ticket_id, history.missing)
        await self.suspects.begin(ticket.header, history)
        self.spawn(self._serve(entry, ticket, history))
        await self.settled()

    async def settled(self) -> None:
        """Wait until nothing is in progress, or the sampler is stopping."""
        while self.tasks and not self.stopping.is_set():
            await asyncio.wait(self.tasks, timeout=SETTLE_S)

    async def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the sampler is stopping."""
        try:
            await asyncio.wait_for(self.stopping.wait(), seconds)
        except TimeoutError:
            pass

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task whose exception ends the sampler."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    # -- serve -------------------------------------------------------------------------------------------

    async def _serve(self, entry: Entry, ticket: Ticket, history: History) -> None:
        with self.counters.working():
            began = time.monotonic()
            generation = await self._draw(entry, ticket)
            if generation is None:
                return
            seconds = time.monotonic() - began
            reward = await self._score(ticket, generation)
            tokens = generation.token_ids.size
            if self._is_old(ticket.header):
                self.counters.generated(tokens, void=True)
                await self._void([entry])
            elif not self.pending.holds(entry):  # taken over while this process was stopped
                self.counters.generated(tokens, void=True)
            elif self.watcher.fenced:
                self.counters.generated(tokens, void=True)
                await self.pending.hand_back([entry])
            else:
                rollout = build_rollout(
                    ticket,
                    generation,
                    reward,
                    sampler=self.name,
                    generate_s=seconds,
                    redraws=len(history.marks),
                )
                await self.pending.publish(entry, rollout, history)
                metrics.generated(seconds)
                self.counters.generated(tokens)
                self.counters.tickets += 1

    async def _draw(self, entry: Entry, ticket: Ticket) -> Generation | None:
        """The ticket's response; None when it was aborted, which settles the ticket or leaves it to drain."""
        try:
            with generate_span(self.config, ticket) as opened:
                generation = await self._generate(ticket)
                if opened is not None:
                    opened.set_attributes(generation_attributes(generation))
                return generation
        except GenerationAborted as exc:
            self.counters.generated(exc.tokens, void=True)
            if self._is_old(ticket.header):
                await self._void([entry])
            elif not self.watcher.ready.is_set():  # fenced
                await self.pending.hand_back([entry])
            elif not self.stopping.is_set():
                raise
            return None
        except LogProbError as exc:
            self.counters.bad_logprobs += 1
            await self.report(f"ticket {ticket.header.ticket_id}: {exc}")
            raise

    async def _generate(self, ticket: Ticket) -> Generation:
        """A response drawn wholly under the ticket's version; any other is discarded and drawn again."""
        header = ticket.header
        for attempt in range(ATTEMPTS):
            if self._is_old(header):
                raise GenerationAborted(f"ticket {header.ticket_id}: its version is gone")
            generation = await self.engine.generate(
                f"{header.ticket_id}#{attempt}",
                ticket.prompt_ids.tolist(),
                header.seed,
                header.max_new_tokens,
            )
            if generation.spans == ((0, generation.token_ids.size, header.version),):
                return generation
            log.warning(
                "ticket %s of version %d: drawn under %s, retrying",
                header.ticket_id, header.version, generation.spans,
            )  # fmt: skip
            self.counters.generated(generation.token_ids.size, void=True)
        raise EngineError(
            f"ticket {header.ticket_id}: none of {ATTEMPTS} responses was drawn under version "
            f"{header.version} alone"
        )

    async def _score(self, ticket: Ticket, generation: Generation) -> RewardResult:
        header = ticket.header
        text = self.decode_text(generation.token_ids.tolist())
        with span("reward", {"leeway.item": header.item}, parent=header.traceparent) as opened:
            reward = await self.rewards.score(header.item, text)
            if opened is not None:
                opened.set_attribute("leeway.reward", reward.value)
        return reward

    def _is_old(self, header: TicketHeader) -> bool:
        return (header.epoch, header.version) < self.watcher.wanted

    async def _void(self, entries: Sequence[Entry]) -> None:
        self.counters.tickets_voided += len(entries)
        await self.pending.void(entries)
