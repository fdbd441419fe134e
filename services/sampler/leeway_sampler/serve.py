"""The sampler's loop: tickets in, rollouts out, always under the one version that the ticket names.

    WeightWatcher   newest manifest -> engine                       (watch.py)
    take            ready? -> read tickets, claim those of dead samplers -> one task each
    work            generate -> one version? -> score -> rollout + acknowledgement in one MULTI
    beat            status with version and digest; idle time of own tickets
    drain           on SIGTERM: read no more, finish within drain_s, hand back the rest, leave

A ticket of an older version is void: acknowledged, never answered. A ticket is acknowledged only in the
MULTI that makes its rollout, or its copy for another sampler, durable. One that came back from dead samplers
sampler.max_deliveries times is drawn alone; when that sampler dies too, it was the ticket: the run ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any

import redis

from leeway.config import RunConfig
from leeway.messages import Rollout, RolloutHeader, Ticket, TicketHeader, decode, encode
from leeway.rewards import RewardPool
from leeway.statuses import remove_status, write_status
from leeway.streams import TICKETS_GROUP, Consumer, Entry, Keys, Tail, add_fields, retrying
from leeway.telemetry.tracing import messaging, span
from leeway_sampler import metrics
from leeway_sampler.engine import EngineError, GenerationAborted, SamplerEngine
from leeway_sampler.generation import Generation, LogProbError
from leeway_sampler.probe import Prober
from leeway_sampler.status import Counters
from leeway_sampler.suspects import Suspects
from leeway_sampler.watch import WeightWatcher

log = logging.getLogger(__name__)

READ_S = 0.5
REGENERATIONS = 3


class Sampler:
    """One sampler. `run` returns after `stop` was called and everything was finished or handed back."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        config: RunConfig,
        engine: SamplerEngine,
        rewards: RewardPool,
        decode_text: Callable[[list[int]], str],
        name: str,
    ) -> None:
        self.client, self.keys, self.config = client, keys, config
        self.engine, self.rewards, self.decode_text, self.name = engine, rewards, decode_text, name
        engine.name = name
        self.budget_s = config.redis.reconnect_s
        self.counters = Counters()
        self.prober = Prober(engine, config.checks.probe_draws)
        self.suspects = Suspects(client, keys, name, self.budget_s)
        self.tickets = Consumer(client, keys.tickets, TICKETS_GROUP, name, budget_s=self.budget_s)
        self.watcher = WeightWatcher(
            Tail(client, keys.weights, budget_s=self.budget_s),
            engine,
            config.sync.commit_timeout_s,
            self._attest,
        )
        self._entries: dict[bytes, Entry] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.Lock()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Holds the newest version and takes tickets."""
        return self.watcher.ready.is_set() and not self._stopping.is_set()

    def readiness(self) -> dict[str, Any]:
        """Body of /readyz."""
        return {"ready": self.ready, "epoch": self.engine.epoch, "version": self.engine.version}

    def stop(self) -> None:
        """Take no more tickets; `run` drains and returns."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop`. Raises what ended a part of it: LeewayError, TimeoutError, RedisError."""
        beat, watch = asyncio.create_task(self._beat()), asyncio.create_task(self.watcher.run())
        take, claim = asyncio.create_task(self._take()), asyncio.create_task(self._claim())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            parts: set[asyncio.Future[Any]] = {beat, watch, take, claim, stopping, self._failed}
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            for part in done:
                part.result()
            watch.cancel()  # a version that comes now is for others
            await asyncio.gather(take, claim)  # they end by themselves, and leave no ticket unseen
            await self._drain()
        finally:
            for task in (beat, watch, take, claim, stopping, *self._work):
                task.cancel()
            await asyncio.gather(beat, watch, take, claim, stopping, *self._work, return_exceptions=True)
            self._failed.cancel()
        await self._leave()

    # -- tickets in ----------------------------------------------------------------------------------

    async def _take(self) -> None:
        while not self._stopping.is_set():
            room = self.config.sampler.max_num_seqs - self.counters.inflight
            if not self.ready or room < 1:
                await self._pause(0.02)
                continue
            await self._accept(await asyncio.to_thread(self.tickets.read, room, READ_S))

    async def _claim(self) -> None:
        idle_s = self.config.sync.ticket_idle_s
        while not self._stopping.is_set():
            await self._pause(idle_s / 4)
            room = self.config.sampler.max_num_seqs - self.counters.inflight
            if not self.ready or room < 1:
                continue
            entries = await asyncio.to_thread(self.tickets.claim_stale, idle_s, room)
            if entries:
                log.warning("took over %d tickets that had no heartbeat for %g s", len(entries), idle_s)
            await self._accept(entries)

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds` or `stop`."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            pass

    async def _accept(self, entries: list[Entry]) -> None:
        """Start on tickets of the version that is held; older ones are void, others go back."""
        self._entries.update((entry.id, entry) for entry in entries)
        async with self._accepting:
            await self._accept_locked(entries)

    async def _accept_locked(self, entries: list[Entry]) -> None:
        void, back, suspects = [], [], []
        deliveries = await asyncio.to_thread(self.tickets.deliveries, entries)
        for entry in entries:
            ticket = decode(Ticket, entry.fields)
            key = (ticket.header.epoch, ticket.header.version)
            if key < self.watcher.wanted:
                void.append(entry)
            elif key == self.watcher.wanted and self.ready:
                if deliveries[entry.id] < self.config.sampler.max_deliveries:
                    self._spawn(self._serve(entry, ticket))
                    if self.prober.due(ticket.prompt_ids):
                        self._spawn(self.prober.run())
                else:
                    suspects.append((entry, ticket))
            else:
                back.append(entry)
        await self._void(void)
        if back:  # another sampler is further than this one, or this one is leaving
            await self._hand_back(back)
            await self._pause(READ_S)
        for entry, ticket in suspects:
            await self._serve_alone(entry, ticket, deliveries[entry.id])

    async def _serve_alone(self, entry: Entry, ticket: Ticket, delivered: int) -> None:
        """Work on a ticket whose samplers died, and on nothing else: if this one dies, it was the ticket."""
        await self._settled()
        if self._stopping.is_set():
            return  # _drain hands it back
        log.warning("ticket %s came back from dead samplers: drawn alone", ticket.header.ticket_id)
        await self.suspects.begin(ticket.header, delivered)
        task = self._spawn(self._serve(entry, ticket))
        await self._settled()
        if task.done() and not task.cancelled() and task.exception() is None:
            await self.suspects.end(ticket.header)

    async def _settled(self) -> None:
        """Wait until nothing is in work, or `stop`."""
        while self._work and not self._stopping.is_set():
            await asyncio.wait(self._work, timeout=READ_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    # -- one ticket ----------------------------------------------------------------------------------

    async def _serve(self, entry: Entry, ticket: Ticket) -> None:
        with self.counters.working():
            began = time.monotonic()
            try:
                with generate_span(self.config, ticket) as opened:
                    generation = await self._generate(ticket)
                    if opened is not None:
                        opened.set_attributes(generation_attributes(generation))
            except GenerationAborted as exc:
                self.counters.generated(exc.tokens, void=True)
                if self._is_old(ticket.header):
                    await self._void([entry])
                elif not self.watcher.ready.is_set():  # fenced
                    await self._hand_back([entry])
                elif not self._stopping.is_set():
                    raise
                return  # draining: _drain hands it back
            except LogProbError as exc:
                self.counters.bad_logprobs += 1
                await self._attest(f"ticket {ticket.header.ticket_id}: {exc}")
                raise
            seconds = time.monotonic() - began
            text = self.decode_text(generation.token_ids.tolist())
            with span(
                "reward", {"leeway.item": ticket.header.item}, parent=ticket.header.traceparent
            ) as opened:
                reward = await self.rewards.score(ticket.header.item, text)
                if opened is not None:
                    opened.set_attribute("leeway.reward", reward.value)
            if self._is_old(ticket.header) or self.watcher.fenced:
                self.counters.generated(generation.token_ids.size, void=True)
                await (self._void if self._is_old(ticket.header) else self._hand_back)([entry])
                return
            rollout = build_rollout(ticket, generation, self.name, reward.value, reward.error, seconds)
            await self._publish(entry, rollout)
            metrics.GENERATE_S.observe(seconds)
            self.counters.generated(generation.token_ids.size)
            self.counters.tickets += 1

    def _is_old(self, header: TicketHeader) -> bool:
        return (header.epoch, header.version) < self.watcher.wanted

    async def _generate(self, ticket: Ticket) -> Generation:
        """A response drawn wholly under the ticket's version; anything else is drawn again."""
        header = ticket.header
        for attempt in range(REGENERATIONS):
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
            log.warning("ticket %s: drawn under %s: once more", header.ticket_id, generation.spans)
            self.counters.generated(generation.token_ids.size, void=True)
        raise EngineError(f"ticket {header.ticket_id}: no response under version {header.version} alone")

    # -- effects -------------------------------------------------------------------------------------

    async def _commit(self, entries: list[Entry], what: str, effects: Callable[[Any], Any]) -> None:
        """`effects` and the acknowledgement of `entries`, all or nothing."""
        ids = [entry.id for entry in entries]

        def execute() -> None:
            with self.client.pipeline(transaction=True) as pipe:
                effects(pipe)
                self.tickets.queue_ack(pipe, ids)
                pipe.execute()

        await asyncio.to_thread(retrying, execute, budget_s=self.budget_s, what=what)
        self.tickets.forget(ids)
        for entry_id in ids:
            self._entries.pop(entry_id, None)

    async def _publish(self, entry: Entry, rollout: Rollout) -> None:
        header = rollout.header
        what = f"publishing rollout {header.ticket_id}"
        attributes = messaging("send", self.keys.rollouts, header.ticket_id)
        with span("publish", attributes, kind="producer", parent=header.traceparent):
            fields = encode(rollout)
            await self._commit([entry], what, lambda pipe: add_fields(pipe, self.keys.rollouts, fields))

    async def _void(self, entries: list[Entry]) -> None:
        self.counters.tickets_voided += len(entries)
        if entries:
            await self._commit(entries, "acknowledging void tickets", lambda pipe: None)

    async def _hand_back(self, entries: list[Entry]) -> None:
        def copies(pipe: Any) -> None:
            for entry in entries:
                add_fields(pipe, self.keys.tickets, entry.fields)

        await self._commit(entries, "handing tickets back", copies)

    # -- life ----------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            if not self.engine.healthy():
                raise EngineError("vLLM's engine process died")
            await self._attest(self.counters.error)
            self.watcher.set_fence(await asyncio.to_thread(self._read_fence))
            if not self.watcher.fenced:  # or others may have what this one works on
                await asyncio.to_thread(self.tickets.refresh, list(self._entries))
            await self._look_for_probe_requests()
            await asyncio.sleep(self.config.sync.heartbeat_s)

    async def _look_for_probe_requests(self) -> None:
        raw = await asyncio.to_thread(
            retrying,
            lambda: self.client.get(self.keys.probe),
            budget_s=self.budget_s,
            what="looking for probe requests",
        )
        if self.ready and self.prober.asked(int(raw or 0)):
            self._spawn(self.prober.run())

    async def _attest(self, error: str | None) -> None:
        self.counters.error = error
        metrics.observe(self.counters, self.ready, self.engine.version)
        status = self.counters.status(self.name, ready=self.ready, engine=self.engine, watcher=self.watcher)
        status = status.model_copy(
            update={
                "logprobs_mode": self.engine.logprobs_mode,
                "bans": self.engine.bans,
                "probe": self.prober.result,
            }
        )
        await asyncio.to_thread(write_status, self.client, self.keys, status, budget_s=self.budget_s)

    def _read_fence(self) -> str:
        fence: Any = retrying(
            lambda: self.client.hget(self.keys.fences, self.name),
            budget_s=self.budget_s,
            what="reading fences",
        )
        return "" if fence is None else fence.decode()

    async def _drain(self) -> None:
        """Finish what is in work within sampler.drain_s, then hand back the rest."""
        if self._work:
            log.info("draining %d responses", len(self._work))
            await asyncio.wait(self._work, timeout=self.config.sampler.drain_s)
        if self._work:
            try:
                await self.engine.abort_all()
            except TimeoutError:
                log.error("the engine did not abort what is in flight")
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)
        rest = list(self._entries.values())
        if rest:
            log.info("handing back %d tickets", len(rest))
            await self._hand_back(rest)

    async def _leave(self) -> None:
        await asyncio.to_thread(remove_status, self.client, self.keys, self.name, budget_s=self.budget_s)
        log.info("left after %d responses of %d tokens", self.counters.tickets, self.counters.tokens)


def generate_span(config: RunConfig, ticket: Ticket) -> AbstractContextManager[Any]:
    """The span of a response's generation; vLLM's own come below it."""
    header = ticket.header
    attributes = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": config.model.name,
        "gen_ai.request.temperature": config.sampling.temperature,
        "gen_ai.request.max_tokens": header.max_new_tokens,
        "gen_ai.request.seed": header.seed,
        "gen_ai.usage.input_tokens": int(ticket.prompt_ids.size),
        "leeway.ticket": header.ticket_id,
        "leeway.batch": header.batch,
        "leeway.version": header.version,
    }
    return span("generate", attributes, kind="consumer", parent=header.traceparent)


def generation_attributes(generation: Generation) -> dict[str, Any]:
    """What is known of a response once it is drawn."""
    return {
        "gen_ai.usage.output_tokens": int(generation.token_ids.size),
        "gen_ai.response.finish_reasons": [generation.finish_reason],
    }


def build_rollout(
    ticket: Ticket,
    generation: Generation,
    sampler: str,
    reward: float,
    reward_error: str | None,
    generate_s: float,
) -> Rollout:
    """The rollout that answers `ticket`."""
    header = ticket.header
    return Rollout(
        header=RolloutHeader(
            ticket_id=header.ticket_id,
            epoch=header.epoch,
            version=header.version,
            batch=header.batch,
            group=header.group,
            index=header.index,
            item=header.item,
            traceparent=header.traceparent,
            sampler=sampler,
            finish_reason=generation.finish_reason,
            reward=reward,
            reward_error=reward_error,
            spans=list(generation.spans),
            support_complete=generation.support_complete,
            digest=generation.digest,
            generate_s=round(generate_s, 4),
        ),
        prompt_ids=ticket.prompt_ids,
        response_ids=generation.token_ids,
        logp=generation.logp,
        head_offsets=generation.head_offsets,
        head_ids=generation.head_ids,
        head_logp=generation.head_logp,
    )
