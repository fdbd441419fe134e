"""WeightWatcher: keeps the engine at the newest published version.

newest manifest -> wanted (no ticket is read) -> apply_weights -> ready, on_change (attest)
                      ^                             | refused or torn: the old version, or none
                      |----- again, or a newer one -|
                      '--- a keyframe, asked for ---'  after ATTEMPTS

A sampler that the controller fenced forgets what it holds and loads the newest version from a keyframe on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from leeway.streams import Tail
from leeway.telemetry.tracing import span
from leeway.weights import VersionKey, WeightManifest, WeightsError, parse_manifest
from leeway_sampler import metrics
from leeway_sampler.engine import SamplerEngine

log = logging.getLogger(__name__)

ATTEMPTS = 5
RETRY_S = 1.0
VERSIONS = 3


class WeightWatcher:
    """`wanted` is the newest version known; `ready` is set while the engine holds it.

    `on_change(error)` is called after every change of either, with what went wrong or None.
    """

    def __init__(
        self,
        tail: Tail,
        engine: SamplerEngine,
        budget_s: float,
        on_change: Callable[[str | None], Awaitable[None]],
    ) -> None:
        self._tail, self._engine, self._budget_s, self._on_change = tail, engine, budget_s, on_change
        self.wanted: VersionKey = (-1, -1)
        self.ready = asyncio.Event()
        self.stuck: VersionKey | None = None
        """A version that could not be had in ATTEMPTS attempts; the trainer sends a keyframe instead."""
        self.fence = ""
        """The controller's fence around this sampler; "" when there is none."""
        self.passed = ""
        """The last fence after which the weights were loaded afresh."""

    @property
    def fenced(self) -> bool:
        """Nothing that is drawn now may leave."""
        return self.fence != self.passed

    def set_fence(self, fence: str) -> None:
        """What the controller says; a new fence makes `run` load the newest version afresh."""
        if fence and fence != self.fence:
            log.warning("fenced (%s): the weights are loaded afresh", fence)
            self.ready.clear()
        self.fence = fence or self.passed

    async def run(self) -> None:
        """Until cancelled. Raises WeightsError or TimeoutError when VERSIONS versions failed in a row."""
        manifest: WeightManifest | None = None
        newest: WeightManifest | None = None
        failures = lost = 0
        while True:
            # While a version waits for another attempt, a newer one must not wait for it.
            newer = await self._newest(RETRY_S)
            if newer is not None:
                newest = manifest = newer
                failures, self.stuck = 0, None
            elif manifest is None and not self.ready.is_set() and self.stuck is None:
                manifest, failures = newest, 0  # a fence came between
            if manifest is None:
                continue
            try:
                await self._apply(manifest)
            except (WeightsError, TimeoutError) as exc:
                failures += 1
                text = str(exc) or f"weights version {manifest.version}: not loaded in {self._budget_s:g} s"
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
        """The newest manifest above `wanted`, or None when `wait_s` brought none."""
        entries = await asyncio.to_thread(self._tail.read, 100, wait_s)
        if not entries:
            return None
        manifest = parse_manifest(entries[-1].fields)
        if manifest.key <= self.wanted:
            log.warning(
                "weights version %d of epoch %d is not above %s: ignored", *manifest.key[::-1], self.wanted
            )
            return None
        self.wanted = manifest.key
        return manifest

    async def _apply(self, manifest: WeightManifest) -> None:
        self.ready.clear()
        fence = self.fence
        if self.fenced:
            self._engine.store.forget()
        # What is in flight belongs to a batch that is void from now on.
        attributes = {"leeway.version": manifest.version, "leeway.epoch": manifest.epoch}
        began = time.monotonic()
        with span("apply weights", attributes, kind="consumer", links=[manifest.traceparent], root=True):
            await self._engine.apply_weights(manifest, inflight="abort", budget_s=self._budget_s)
        metrics.APPLY_S.observe(time.monotonic() - began)
        log.info("holds weights version %d (epoch %d)", manifest.version, manifest.epoch)
        self.passed, self.stuck = fence, None
        if not self.fenced:
            self.ready.set()
        await self._on_change(None)
