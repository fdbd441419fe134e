"""The sampler's loop: tickets in, rollouts out, each drawn wholly under the version that its ticket names.

    task    waits for                                       unblocked by
    watch   a newer version, or a fence                     the trainer; the controller (watch.py)
    take    ready and fewer than max_num_seqs in progress   watch loads the newest version; settled tickets
            then a ticket                                   the controller issues a batch
    claim   a quarter of sync.ticket_idle_s                 time; then takes over what dead samplers held
    beat    sync.heartbeat_s                                time; then looks at the engine's progress, writes
                                                            the status, reads the fence and renews the
                                                            claim on the tickets in progress
    run     stop, or the end of any task above              SIGTERM; an exception
    drain   tickets in progress, at most sampler.drain_s    they are settled; the rest is handed back

tickets.py says what becomes of a ticket, pending.py how that is made durable. A ticket whose samplers die is
drawn alone in the end; when that sampler dies too, the ticket is the cause and the run ends (suspects.py). An
engine that has requests and draws nothing ends the process (stall.py); what it held is taken over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import redis

from leeway.config import RunConfig
from leeway.config.identity import Identity, identify, name_keys, short
from leeway.events import CONFIG_DIFFERS, write_event
from leeway.incarnations import forget_sampler, new_holder, register
from leeway.rewards import RewardPool
from leeway.statuses import remove_status, write_status
from leeway.streams import CONFIG_FIELD, Keys, Tail, retrying
from leeway.weights import WeightManifest
from leeway_sampler import metrics
from leeway_sampler.engine import EngineError, EngineHung, SamplerEngine
from leeway_sampler.pending import PendingTickets
from leeway_sampler.probe import Prober
from leeway_sampler.stall import StallClock
from leeway_sampler.status import Counters
from leeway_sampler.suspects import Suspects
from leeway_sampler.tickets import TicketWorker
from leeway_sampler.watch import WeightWatcher

log = logging.getLogger(__name__)

READ_S = 0.5
"""Seconds that one read waits for tickets: the longest that `stop` has to wait for it."""
NOT_READY_S = 0.02


class Sampler:
    """One sampler. `run` returns after `stop`, when every ticket has been answered or handed back.

    `holder`: this process, if it is registered already (`leeway.incarnations`).
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        config: RunConfig,
        engine: SamplerEngine,
        rewards: RewardPool,
        decode_text: Callable[[list[int]], str],
        name: str,
        holder: str | None = None,
    ) -> None:
        self.client, self.keys, self.config, self.engine, self.name = client, keys, config, engine, name
        self.budget_s = config.redis.reconnect_s
        self.identity = identify(config)
        self.counters = Counters(self.identity.digest)
        self.prober = Prober(engine, config.checks.probe_draws)
        self.holder = holder or new_holder(name)
        self.pending = PendingTickets(client, keys, self.holder, self.budget_s)
        self.stall = StallClock(
            config.sampler.stall_timeout_s, config.sampler.start_timeout_s, 3 * config.sync.heartbeat_s
        )
        self.watcher = WeightWatcher(
            Tail(client, keys.weights, budget_s=self.budget_s),
            engine.weights,
            config.sync.commit_timeout_s,
            self._attest,
            self.identity.digest,
            self._refuse_config,
        )
        self._stopping = asyncio.Event()
        self._taking = asyncio.Lock()
        """Held from counting the room to filling it."""
        self.worker = TicketWorker(
            config=config,
            name=name,
            engine=engine,
            rewards=rewards,
            identity=self.identity,
            decode_text=decode_text,
            pending=self.pending,
            watcher=self.watcher,
            prober=self.prober,
            suspects=Suspects(
                client, keys, self.holder, silence_s=config.sync.ticket_idle_s, budget_s=self.budget_s
            ),
            counters=self.counters,
            stopping=self._stopping,
            report=self._attest,
        )

    @property
    def ready(self) -> bool:
        """Whether the newest version is loaded and tickets are taken."""
        return self.worker.ready

    def readiness(self) -> dict[str, Any]:
        """Body of /readyz."""
        loaded = self.engine.weights.loaded
        return {"ready": self.ready, "epoch": loaded.epoch, "version": loaded.version}

    def healthy(self) -> bool:
        """Whether vLLM's processes are alive and draw tokens."""
        return self.engine.healthy() and not self.stall.hung

    def stop(self) -> None:
        """Take no more tickets; `run` drains and returns."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop`. Raises what ended one of its tasks: LeewayError, TimeoutError or RedisError."""
        await asyncio.to_thread(register, self.client, self.keys, self.holder, budget_s=self.budget_s)
        beat, watch = asyncio.create_task(self._beat()), asyncio.create_task(self.watcher.run())
        take, claim = asyncio.create_task(self._take()), asyncio.create_task(self._claim())
        stopping, failed = asyncio.create_task(self._stopping.wait()), self.worker.failed
        try:
            parts: set[asyncio.Future[Any]] = {beat, watch, take, claim, stopping, failed}
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            for part in done:
                part.result()
            watch.cancel()  # a version published from now on is for the other samplers
            await asyncio.gather(take, claim)  # not cancelled: a ticket they are about to read would be lost
            await self._drain()
        finally:
            for task in (beat, watch, take, claim, stopping, *self.worker.tasks):
                task.cancel()
            await asyncio.gather(
                beat, watch, take, claim, stopping, *self.worker.tasks, return_exceptions=True
            )
            failed.cancel()
        await self._leave()

    # -- tickets -----------------------------------------------------------------------------------------

    def _room(self) -> int:
        """How many tickets may be taken now."""
        return self.config.sampler.max_num_seqs - len(self.worker.tasks) if self.ready else 0

    async def _take(self) -> None:
        while not self._stopping.is_set():
            async with self._taking:
                room = self._room()
                if room > 0:
                    await self.worker.accept(await self.pending.read(room, READ_S))
            if room < 1:
                await self.worker.pause(NOT_READY_S)

    async def _claim(self) -> None:
        idle_s = self.config.sync.ticket_idle_s
        while not self._stopping.is_set():
            await self.worker.pause(idle_s / 4)
            async with self._taking:
                room = self._room()
                entries = await self.pending.take_over(idle_s, room) if room > 0 else []
                if entries:
                    log.warning("took over %d tickets without progress for %g s", len(entries), idle_s)
                await self.worker.accept(entries)

    # -- heartbeat ---------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            if not self.engine.healthy():
                raise EngineError("vLLM's engine process died")
            await self._check_progress()
            await self._attest(self.counters.error)
            fence = await self._redis("reading fences", lambda: self.client.hget(self.keys.fences, self.name))
            self.watcher.set_fence("" if fence is None else fence.decode())
            if not self.watcher.fenced:  # while it is fenced, others may claim what this sampler holds
                await self.pending.renew(self.config.sync.ticket_idle_s)
            request = await self._redis("reading probe requests", lambda: self.client.get(self.keys.probe))
            if self.ready and self.prober.asked(int(request or 0)):
                self.worker.spawn(self.prober.run())
            await asyncio.sleep(self.config.sync.heartbeat_s)

    async def _check_progress(self) -> None:
        """Raise EngineHung when the engine has requests and has drawn no token for too long.

        Its tickets are not renewed any more, and this process ends: vLLM cannot be restarted within it.
        """
        engine, stall = self.engine, self.stall
        stall.look(
            time.monotonic(),
            drawn=engine.drawn,
            inflight=engine.inflight,
            pausing=engine.weights.pausing,
        )
        if stall.hung:
            text = (
                f"vLLM has drawn no token for {stall.silent_s:.0f} s with {engine.inflight} responses in "
                f"flight (limit {stall.limit_s:g} s, sampler.stall_timeout_s): the engine hangs; its tickets "
                "go to other samplers"
            )
            await self._attest(text)
            raise EngineHung(text)

    async def _attest(self, error: str | None) -> None:
        """Write this sampler's status; `error`: what is wrong with it, None when nothing is."""
        self.counters.error = error
        metrics.observe(self.counters, self.ready, self.engine.version)
        status = self.counters.status(
            self.name, ready=self.ready, engine=self.engine, watcher=self.watcher, probe=self.prober.result
        )
        await asyncio.to_thread(
            write_status, self.client, self.keys, status, budget_s=self.budget_s, holder=self.holder
        )

    async def _refuse_config(self, manifest: WeightManifest) -> None:
        """The run has another configuration: say so, and in which keys."""
        raw = await self._redis(
            "reading the run's configuration", lambda: self.client.hget(self.keys.state, CONFIG_FIELD)
        )
        theirs = Identity("" if raw is None else raw.decode())
        # It may be that of a trainer that was started since, and then it does not explain this version.
        keys = self.identity.differences(theirs) if theirs.digest == manifest.config else []
        self.counters.config_differs = keys
        text = (
            f"sampler {self.name} takes no tickets: it has configuration {short(self.identity.digest)}, run "
            f"epoch {manifest.epoch} has {short(manifest.config)}{name_keys(keys)}; restart the one that has "
            "the old configuration"
        )
        await self._attest(text)
        await self._event(CONFIG_DIFFERS, text)

    async def _event(self, name: str, text: str) -> None:
        log.warning("%s", text)
        await asyncio.to_thread(
            write_event,
            self.client,
            self.keys,
            source=self.name,
            name=name,
            text=text,
            level="warning",
            budget_s=self.budget_s,
        )

    async def _redis(self, what: str, call: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(retrying, call, budget_s=self.budget_s, what=what)

    # -- the end -----------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Finish what is in progress, so that no draw depends on its length; after sampler.drain_s hand back
        the rest, which others draw again.
        """
        tasks = self.worker.tasks
        if tasks:
            log.info("draining %d responses", len(tasks))
            await asyncio.wait(tasks, timeout=self.config.sampler.drain_s)
        if tasks:
            try:
                await self.engine.abort_all()
            except TimeoutError:
                log.error("the engine did not abort the requests in flight in time")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self.pending.drop_lost()
        rest = self.pending.held
        if rest:
            await self.pending.hand_back(rest, cut=True)
            await self._event(
                "drain_cut",
                f"sampler {self.name} is ending: {len(rest)} responses were not finished within "
                f"sampler.drain_s={self.config.sampler.drain_s:g}, and others draw them again. That happens "
                "to long responses more often than to short ones: set it above the time of the longest",
            )

    async def _leave(self) -> None:
        await self.worker.suspects.leave()
        await self.pending.leave()
        await asyncio.to_thread(forget_sampler, self.client, self.keys, self.name, budget_s=self.budget_s)
        await asyncio.to_thread(remove_status, self.client, self.keys, self.name, budget_s=self.budget_s)
        log.info("left after %d responses of %d tokens", self.counters.tickets, self.counters.tokens)
