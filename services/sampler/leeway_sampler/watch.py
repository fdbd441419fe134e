"""WeightWatcher: keeps the engine at the newest published version.

    waits for                        unblocked by
    a manifest above `wanted`        the trainer publishes a version -> wanted, not ready, apply
    a retry, RETRY_S                 time, or a newer manifest, which replaces the one that failed
    `stuck`, after ATTEMPTS          a newer manifest: the trainer answers `stuck` with a keyframe
    a fence, while ready             the controller -> not ready, apply the newest manifest
    another configuration            a manifest of this sampler's configuration; until then not ready

    apply -> loaded           -> ready, on_change(None)
          -> refused or torn  -> on_change(error), retry

A fenced sampler loads the newest version; if the fence says so, from a keyframe, after discarding its host
copy. A fetch that is interrupted goes on where it stopped, also for a newer version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from leeway.statuses import FULL
from leeway.streams import Tail
from leeway.telemetry.tracing import span
from leeway.weights import VersionKey, WeightManifest, WeightsError, parse_manifest
from leeway_sampler import metrics
from leeway_sampler.weight_update import EngineWeights

log = logging.getLogger(__name__)

ATTEMPTS = 5
"""Attempts to load a version before a keyframe is asked for."""
RETRY_S = 1.0
VERSIONS = 3
"""Consecutive versions that may fail before the sampler gives up."""


class WeightWatcher:
    """`wanted` is the newest known version; `ready` is set while the engine holds it.

    `on_change(error)` is called after each attempt to load a version: with None when it succeeded, and with
    what went wrong after the attempts that did not. `budget_s`: seconds that an attempt may make no progress.
    `config`: digest of the sampler's configuration; versions of another one are not loaded, and `on_foreign`
    is called with the manifest of the first.
    """

    def __init__(
        self,
        tail: Tail,
        weights: EngineWeights,
        budget_s: float,
        on_change: Callable[[str | None], Awaitable[None]],
        config: str,
        on_foreign: Callable[[WeightManifest], Awaitable[None]],
    ) -> None:
        self._tail, self._weights, self._budget_s, self._on_change = tail, weights, budget_s, on_change
        self._config, self._on_foreign = config, on_foreign
        self.foreign = ""
        """The run's configuration, if it is another one than this sampler's."""
        self.wanted: VersionKey = (-1, -1)
        self.ready = asyncio.Event()
        self.stuck: VersionKey | None = None
        """A version that failed ATTEMPTS times; the trainer answers with a keyframe."""
        self.fence = ""
        """The controller's fence around this sampler; "" when there is none."""
        self.passed = ""
        """The last fence after which the weights were loaded as it demands."""

    @property
    def fenced(self) -> bool:
        """Whether nothing that is drawn now may be published."""
        return self.fence != self.passed

    def set_fence(self, fence: str) -> None:
        """Take over the controller's fence; a new one makes `run` load the newest version again."""
        if fence and fence != self.fence:
            log.warning("fenced (%s): loading the newest weights", fence)
            self.ready.clear()
        self.fence = fence or self.passed

    async def run(self) -> None:
        """Until cancelled. Raises WeightsError or TimeoutError when VERSIONS versions in a row failed."""
        manifest: WeightManifest | None = None
        newest: WeightManifest | None = None
        failures = lost = 0
        while True:
            # Read before every attempt: a newer version must not wait for one that keeps failing.
            newer = await self._newest(RETRY_S)
            if newer is not None and newer.config != self._config:
                newest = manifest = self.stuck = None
                await self._refuse(newer)
            elif newer is not None:
                self.foreign = ""
                newest = manifest = newer
                failures, self.stuck = 0, None
            elif manifest is None and not self.ready.is_set() and self.stuck is None:
                manifest, failures = newest, 0  # fenced since it was loaded
            if manifest is None:
                continue
            try:
                await self._apply(manifest)
            except (WeightsError, TimeoutError) as exc:
                failures += 1
                text = (
                    str(exc) or f"weights version {manifest.version}: not loaded within {self._budget_s:g} s"
                )
                log.error("%s (attempt %d of %d)", text, failures, ATTEMPTS)
                if failures == ATTEMPTS:
                    lost += 1
                    self.stuck, manifest = manifest.key, None
                await self._on_change(text)
                if lost == VERSIONS:
                    raise
            else:
                manifest, lost = None, 0

    async def _newest(self, wait_s: float) -> WeightManifest | None:
        """The newest manifest above `wanted`, or None when none arrived in `wait_s` seconds."""
        entries = await asyncio.to_thread(self._tail.read, 100, wait_s)
        if not entries:
            return None
        # Not the last one: a trainer that was replaced may have been late with its own.
        manifest = max((parse_manifest(entry.fields) for entry in entries), key=lambda found: found.key)
        if manifest.key <= self.wanted:
            log.warning(
                "ignored weights version %d of epoch %d: not above version %d of epoch %d",
                *manifest.key[::-1],
                *self.wanted[::-1],
            )
            return None
        self.wanted = manifest.key
        return manifest

    async def _refuse(self, manifest: WeightManifest) -> None:
        """Be not ready: the run has another configuration since `manifest`."""
        self.ready.clear()
        known, self.foreign = self.foreign == manifest.config, manifest.config
        if not known:
            await self._on_foreign(manifest)

    async def _apply(self, manifest: WeightManifest) -> None:
        self.ready.clear()
        fence = self.fence
        if self.fenced and fence.endswith(FULL):
            self._weights.forget()
        attributes = {"leeway.version": manifest.version, "leeway.epoch": manifest.epoch}
        began = time.monotonic()
        with span("apply weights", attributes, kind="consumer", links=[manifest.traceparent], root=True):
            # Requests in flight belong to batches that the new version makes void.
            await self._weights.apply(manifest, inflight="abort", budget_s=self._budget_s)
        metrics.applied(time.monotonic() - began)
        log.info("loaded weights version %d (epoch %d)", manifest.version, manifest.epoch)
        # Being late is made up for also by a load that began before the fence.
        self.passed, self.stuck = fence if self.fence.endswith(FULL) else self.fence, None
        if not self.fenced:
            self.ready.set()
        await self._on_change(None)
