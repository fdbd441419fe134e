"""What a sampler reports about itself: its entry in the hash `samplers`, and its health pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from leeway.messages import Probe, SamplerStatus
from leeway.streams import now

if TYPE_CHECKING:
    from leeway_sampler.engine import SamplerEngine
    from leeway_sampler.serve import Sampler
    from leeway_sampler.watch import WeightWatcher

T = TypeVar("T")

ANSWER_S = 4.0
"""Seconds that a health page waits for the event loop: less than the chart's probes wait for the page."""


class Counters:
    """Counts of the sampler's work since its start. `config`: digest of its configuration."""

    def __init__(self, config: str = "") -> None:
        self.config = config
        self.config_differs: list[str] = []
        """Keys in which the run's configuration is another one."""
        self._began = time.monotonic()
        self._busy_s = 0.0
        self._busy_since = 0.0
        self.inflight = 0
        self.tokens = 0
        self.tokens_voided = 0
        self.tickets = 0
        self.tickets_voided = 0
        self.bad_logprobs = 0
        self.error: str | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around the work on one ticket; the sampler is busy while at least one is in progress."""
        if self.inflight == 0:
            self._busy_since = time.monotonic()
        self.inflight += 1
        try:
            yield
        finally:
            self.inflight -= 1
            if self.inflight == 0:
                self._busy_s += time.monotonic() - self._busy_since

    @property
    def busy_s(self) -> float:
        """Seconds with at least one ticket in progress."""
        return self._busy_s + (time.monotonic() - self._busy_since if self.inflight else 0.0)

    def generated(self, tokens: int, *, void: bool = False) -> None:
        """Count drawn tokens; `void`: they belong to a response that is not published."""
        self.tokens += tokens
        self.tokens_voided += tokens if void else 0

    def status(
        self, sampler: str, *, ready: bool, engine: SamplerEngine, watcher: WeightWatcher, probe: Probe | None
    ) -> SamplerStatus:
        """The status of `sampler` now."""
        weights = engine.weights
        return SamplerStatus(
            sampler=sampler,
            heartbeat=now(),
            ready=ready,
            epoch=weights.loaded.epoch,
            version=-1 if weights.loaded.version is None else weights.loaded.version,
            digest=weights.loaded.digest,
            config=self.config,
            config_differs=self.config_differs if watcher.foreign else [],
            stage_s=round(weights.stage_s, 4),
            pause_s=round(weights.pause_s, 4),
            fetched_at=round(weights.fetched_at, 3),
            stuck=watcher.stuck,
            fenced=watcher.fenced,
            passed=watcher.passed,
            inflight=self.inflight,
            busy_s=round(self.busy_s, 3),
            uptime_s=round(time.monotonic() - self._began, 3),
            tokens=self.tokens,
            tokens_voided=self.tokens_voided,
            tickets=self.tickets,
            bad_logprobs=self.bad_logprobs,
            logprobs_mode=engine.logprobs_mode,
            bans=engine.bans,
            probe=probe,
            error=self.error,
        )


class SamplerHealth:
    """Answers the health server from the sampler's event loop, so that a blocked loop fails its probes."""

    def __init__(self, sampler: Sampler, loop: asyncio.AbstractEventLoop) -> None:
        self._sampler, self._loop = sampler, loop

    def alive(self) -> bool:
        """Whether the event loop runs, and vLLM's processes are alive and draw tokens."""
        return self._ask(self._sampler.healthy, otherwise=False)

    @property
    def ready(self) -> dict[str, Any]:
        """Body of /readyz."""
        return self._ask(self._sampler.readiness, otherwise={"ready": False})

    def _ask(self, question: Callable[[], T], *, otherwise: T) -> T:
        async def answer() -> T:
            return question()

        asked = asyncio.run_coroutine_threadsafe(answer(), self._loop)
        try:
            return asked.result(ANSWER_S)
        except TimeoutError:
            asked.cancel()
            return otherwise
