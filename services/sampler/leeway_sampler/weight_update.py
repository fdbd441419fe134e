"""EngineWeights: which weights the engine holds, and how a new version replaces them.

NOTHING -> apply(manifest) -> loaded
              | refused: could not be staged, or not loaded and the previous version was put back
              |                            -> loaded as before, the engine keeps generating
              | torn: could not be put back -> NOTHING, the engine rejects requests
              '-> the next apply repairs both

apply waits for               unblocked by
another apply                 its end
stage (engine generates)      the transport has the whole version, verified; or no part came for budget_s
pause                         requests in flight are aborted, or have finished (inflight="wait")
load (engine paused)          vLLM's workers have loaded it; or budget_s
resume                        always, whatever happened in between
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import redis

from leeway.errors import LeewayError
from leeway.weights import Patience, WeightManifest, WeightsError
from leeway_sampler.transports.base import FAILED, WeightReceiver

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)


class WeightsRefused(WeightsError):
    """A version could not be fetched or loaded; the engine holds the previous one."""


class WeightsTorn(WeightsError):
    """A version could not be loaded and the previous one could not be put back; the engine holds none."""


RESUME_S = 30.0
"""Maximum time to resume generation; an engine that takes longer hangs."""


@dataclass(frozen=True)
class Loaded:
    """The weights in the engine. `version` is None when there is no complete version."""

    epoch: int = -1
    version: int | None = None
    digest: str = ""


NOTHING = Loaded()


def loaded_from(manifest: WeightManifest) -> Loaded:
    """What the engine holds once it has loaded `manifest`."""
    return Loaded(manifest.epoch, manifest.version, manifest.digest)


class EngineWeights:
    """See the module's docstring. All methods belong to one event loop.

    `transport`: name of the transport that `receiver` belongs to.
    """

    def __init__(self, llm: AsyncLLM, transport: str, receiver: WeightReceiver) -> None:
        self._llm, self.transport, self.receiver = llm, transport, receiver
        self._updating = asyncio.Lock()
        self._patience = Patience(0.0)
        self.pausing = False
        """Whether generation is paused for new weights."""
        self.loaded = NOTHING
        """NOTHING before the first version, during a load and after a torn one."""
        self.stage_s = 0.0
        """Seconds that fetching and verifying took in the last update."""
        self.pause_s = 0.0
        """Seconds that generation was paused in the last update."""

    async def apply(
        self,
        manifest: WeightManifest,
        *,
        inflight: Literal["abort", "wait"] = "abort",
        budget_s: float = 120.0,
    ) -> str:
        """Replace the weights with those of `manifest`. Returns the digest of what was loaded.

        The version is staged while the engine keeps generating. Then requests in flight are aborted or waited
        for, the weights are loaded and the prefix cache is emptied; later requests draw from the new version.

        `budget_s` limits the time without a part of the version arriving, and the time of the pause.

        Raises WeightsRefused (`loaded` is unchanged), WeightsTorn and TimeoutError (`loaded` is NOTHING until
        an update succeeds).
        """
        async with self._updating:
            started = time.monotonic()
            await self._stage(manifest, Patience(budget_s))
            staged = time.monotonic()
            self.stage_s = staged - started
            async with asyncio.timeout(budget_s):
                self.pausing = True
                try:
                    await self._paused(manifest, inflight)
                finally:
                    self.pausing = False
                    self.pause_s = time.monotonic() - staged
        return self.loaded.digest

    async def _paused(self, manifest: WeightManifest, inflight: Literal["abort", "wait"]) -> None:
        await self._llm.pause_generation(mode=inflight, clear_cache=True)
        try:
            await self._swap(manifest)
        finally:
            # Shielded: an engine that stays paused looks healthy and never answers.
            await asyncio.wait_for(asyncio.shield(self._llm.resume_generation()), RESUME_S)

    def forget(self) -> None:
        """Have the next version fetched in full; the engine keeps what it has loaded."""
        self.receiver.forget()

    @property
    def fetched_at(self) -> float:
        """Unix time when a part of a version last arrived, by the server's clock; 0: never."""
        return self._patience.renewed_at

    async def _stage(self, manifest: WeightManifest, patience: Patience) -> None:
        if manifest.transport != self.transport:
            raise WeightsRefused(
                f"weights version {manifest.version} was published by transport {manifest.transport!r}, but "
                f"this sampler receives weights by {self.transport!r}: start trainer and samplers with the "
                "same weights.transport"
            )
        patience.renewed_at, self._patience = self._patience.renewed_at, patience
        try:
            await asyncio.to_thread(self.receiver.stage, manifest, patience)
        except asyncio.CancelledError:
            patience.cancel()  # the thread ends with its next part
            raise
        except (LeewayError, redis.RedisError, OSError, TimeoutError) as exc:
            raise WeightsRefused(f"{exc}; the weights in the engine are unchanged") from exc

    async def _swap(self, manifest: WeightManifest) -> None:
        previous, self.loaded = self.loaded, NOTHING
        try:
            await self._load(manifest)
        except Exception as exc:
            reason = worker_reason(exc)
            await self._close_update()
            await self._put_back(previous, self.receiver.rollback(), reason)
            raise WeightsRefused(f"{reason}; version {previous.version} was put back") from exc
        self.receiver.commit()
        self.loaded = loaded_from(manifest)

    async def _load(self, manifest: WeightManifest) -> None:
        await self.receiver.load(self._llm, manifest)
        if not await self._llm.reset_prefix_cache():
            raise WeightsError("the prefix cache could not be emptied")

    async def _put_back(self, previous: Loaded, held: WeightManifest | None, reason: str) -> None:
        """Load the previous weights again. Raises WeightsTorn when that fails or they are not held."""
        if held is None or loaded_from(held) != previous:
            raise WeightsTorn(f"{reason}; there are no weights to put back")
        try:
            await self._load(held)
        except Exception as exc:
            await self._close_update()
            raise WeightsTorn(
                f"{reason}; putting version {previous.version} back: {worker_reason(exc)}"
            ) from exc
        self.loaded = previous

    async def _close_update(self) -> None:
        # The worker that failed has closed its update; the others of a tensor-parallel group have not.
        try:
            await self._llm.finish_weight_update()
        except Exception as exc:  # noqa: BLE001 (vLLM raises a bare Exception)
            log.debug("closing the failed update: %s", exc)


def worker_reason(exc: Exception) -> str:
    """Why an update failed, without the text that vLLM puts around a worker's exception."""
    text = str(exc) or type(exc).__name__
    return text.split(FAILED, 1)[1].split("', please check")[0].strip() if FAILED in text else text
