"""WeightWatcher: keeps the engine at the newest published version.

newest manifest -> wanted (no ticket is read) -> apply_weights -> ready, on_change (attest)
                      ^                             | refused or torn
                      '----- again, or a newer one -'
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from leeway.streams import Tail
from leeway.weights import WeightManifest, WeightsError, parse_manifest
from leeway_sampler.engine import SamplerEngine

log = logging.getLogger(__name__)

ATTEMPTS = 5
RETRY_S = 1.0
VersionKey = tuple[int, int]
"""(run epoch, weight version): the order in which versions replace each other."""


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

    async def run(self) -> None:
        """Until cancelled. Raises WeightsError or TimeoutError when a version fails ATTEMPTS times."""
        manifest: WeightManifest | None = None
        failures = 0
        while True:
            # While a version waits for another attempt, a newer one must not wait for it.
            newer = await self._newest(RETRY_S)
            if newer is not None:
                manifest, failures = newer, 0
            if manifest is None:
                continue
            try:
                await self._apply(manifest)
            except (WeightsError, TimeoutError) as exc:
                failures += 1
                text = str(exc) or f"weights version {manifest.version}: not loaded in {self._budget_s:g} s"
                log.error("%s (attempt %d of %d)", text, failures, ATTEMPTS)
                await self._on_change(text)
                if failures == ATTEMPTS:
                    raise
            else:
                manifest = None

    async def _newest(self, wait_s: float) -> WeightManifest | None:
        """The newest manifest above `wanted`, or None when `wait_s` brought none."""
        entries = await asyncio.to_thread(self._tail.read, 100, wait_s)
        if not entries:
            return None
        manifest = parse_manifest(entries[-1].fields)
        key = (manifest.epoch, manifest.version)
        if key <= self.wanted:
            log.warning(
                "weights version %d of epoch %d is not above %s: ignored", key[1], key[0], self.wanted
            )
            return None
        self.wanted = key
        return manifest

    async def _apply(self, manifest: WeightManifest) -> None:
        self.ready.clear()
        # What is in flight belongs to a batch that is void from now on.
        await self._engine.apply_weights(manifest, inflight="abort", budget_s=self._budget_s)
        log.info("holds weights version %d (epoch %d)", manifest.version, manifest.epoch)
        self.ready.set()
        await self._on_change(None)
