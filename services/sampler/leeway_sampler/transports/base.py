"""What a weight transport implements on the sampler's side.

    start          open -> check_platform -> vLLM starts with `backend` -> init_engine
    each version   stage (the engine keeps generating) -> (engine paused) load -> commit
                                                          load failed: rollback -> load the previous one
    fenced         forget
    end            close

A transport is one module that defines TRANSPORT. It must not import vLLM or torch at import time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leeway.config import RunConfig
from leeway.weights import Patience, WeightManifest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

FAILED = "[leeway:weights-failed]"
"""vLLM passes a worker's exception on as text. A worker puts this marker in front of the reason, so that the
sampler can report the reason alone."""


@dataclass(frozen=True)
class Endpoint:
    """The sampler that weights go to, and where its run is."""

    config: RunConfig
    redis_url: str
    run: str
    sampler: str
    """Name of the sampler."""


class WeightReceiver(ABC):
    """A sampler's end of a transport. A subclass implements at least `stage` and `load`.

    The engine calls one method at a time; `stage` runs in a thread, everything else in the event loop.
    """

    async def init_engine(self, llm: AsyncLLM) -> None:  # noqa: B027 (optional)
        """Prepare vLLM's workers, once, after the engine has started."""

    @abstractmethod
    def stage(self, manifest: WeightManifest, patience: Patience) -> None:
        """Do everything that does not need the engine to pause: check, fetch, verify.

        `patience` limits the time without progress, not the whole: renew it with every part that arrives.
        Raises LeewayError, redis.RedisError, OSError or TimeoutError; what can be loaded is then what it was,
        and another attempt may go on with what was fetched.
        """

    @abstractmethod
    async def load(self, llm: AsyncLLM, manifest: WeightManifest) -> None:
        """Replace the engine's weights with those of `manifest`: the staged one, or what `rollback` returned.

        Whatever it raises, the engine may hold a mixture of both versions afterwards.
        """

    def commit(self) -> None:  # noqa: B027 (optional)
        """The engine has loaded the staged version: there is no way back from here."""

    def rollback(self) -> WeightManifest | None:
        """Discard the staged version. Returns the one that `load` can load again, None if there is none."""
        return None

    def forget(self) -> None:  # noqa: B027 (optional)
        """Discard everything that is held: the next version is fetched in full."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Release connections and memory."""


def any_platform(is_cuda: bool, name: str) -> None:
    """A check that always passes: the transport works wherever vLLM does."""


@dataclass(frozen=True)
class Transport:
    """An entry of the registry `leeway_sampler.transports.TRANSPORTS`."""

    backend: str
    """Name of the weight-transfer backend in vLLM."""
    open: Callable[[Endpoint], WeightReceiver]
    """Connect the sampler, before vLLM starts. Runs in a thread. Raises LeewayError."""
    worker: tuple[str, str] | None = None
    """Module and class of the backend's vllm WeightTransferEngine; None when vLLM has it built in."""
    check_platform: Callable[[bool, str], None] = any_platform
    """Called with (is CUDA, device name). Raises UsageError where the transport cannot work."""

    def register(self) -> None:
        """Make the backend known to vLLM in this process; repeated calls have no effect."""
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        if self.worker is not None and self.backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(self.backend, *self.worker)


async def update_weights(llm: AsyncLLM, update_info: dict[str, Any], version: int) -> None:
    """One update in vLLM's workers: start, transfer, finish. Tokens drawn afterwards carry `version`."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))
    await llm.finish_weight_update(weight_version=str(version))
