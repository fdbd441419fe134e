"""What a sampler tells about itself: counters of its work, as an entry of the hash `samplers`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from leeway.messages import SamplerStatus
from leeway.streams import now

if TYPE_CHECKING:
    from leeway_sampler.engine import SamplerEngine
    from leeway_sampler.watch import WeightWatcher


class Counters:
    """Work since the start."""

    def __init__(self) -> None:
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
        """Around the work on one ticket; the sampler is busy while at least one is worked on."""
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
        """Seconds with at least one ticket in work."""
        return self._busy_s + (time.monotonic() - self._busy_since if self.inflight else 0.0)

    def generated(self, tokens: int, *, void: bool = False) -> None:
        """Count drawn tokens; `void`: of a response that is not published."""
        self.tokens += tokens
        self.tokens_voided += tokens if void else 0

    def status(
        self, sampler: str, *, ready: bool, engine: SamplerEngine, watcher: WeightWatcher
    ) -> SamplerStatus:
        """The status to write now."""
        return SamplerStatus(
            sampler=sampler,
            heartbeat=now(),
            ready=ready,
            epoch=engine.epoch,
            version=-1 if engine.version is None else engine.version,
            digest=engine.digest,
            stage_s=round(engine.staged_s, 4),
            pause_s=round(engine.paused_s, 4),
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
            error=self.error,
        )
