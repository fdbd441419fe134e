"""Weights through a directory that trainer and samplers share: the sampler's side.

    stage      every tensor's digest is verified, while the engine keeps generating
    load       vLLM's workers map the file and load from it

The file of the previous version exists until all samplers have a newer one, so it can be loaded again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from leeway.weights import Patience, WeightManifest, WeightsCorrupt
from leeway_sampler.transports.base import Endpoint, Transport, WeightReceiver, update_weights

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class SharedDirectoryReceiver(WeightReceiver):
    """Remembers which version the engine has loaded, and which one is next."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.loaded: WeightManifest | None = None
        self.staged: WeightManifest | None = None

    async def init_engine(self, llm: AsyncLLM) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))

    def stage(self, manifest: WeightManifest, patience: Patience) -> None:
        """Raises WeightsCorrupt, OSError and TimeoutError."""
        with file_of(manifest).open("rb") as file:
            for spec in manifest.tensors:
                patience.check(f"version {manifest.version}, before tensor {spec.name}")
                if xxhash.xxh3_128_hexdigest(file.read(spec.nbytes)) != spec.digest:
                    raise WeightsCorrupt(
                        "its digest is not that of the manifest", version=manifest.version, tensor=spec.name
                    )
                patience.renew()
        self.staged = manifest

    async def load(self, llm: AsyncLLM, manifest: WeightManifest) -> None:
        info = {"path": str(file_of(manifest)), "manifest": manifest.model_dump_json()}
        await update_weights(llm, info, manifest.version)

    def commit(self) -> None:
        self.loaded, self.staged = self.staged, None

    def rollback(self) -> WeightManifest | None:
        self.staged = None
        return self.loaded

    def forget(self) -> None:
        self.loaded = self.staged = None


def file_of(manifest: WeightManifest) -> Path:
    """Raises WeightsCorrupt for a manifest without a path."""
    path = (manifest.offer or {}).get("path")
    if not isinstance(path, str):
        raise WeightsCorrupt(f"its offer {manifest.offer} has no path", version=manifest.version)
    return Path(path)


TRANSPORT = Transport(
    # The workers' part of the built-in transport loads from any file with the layout of the manifest.
    backend="redis",
    open=SharedDirectoryReceiver,
    worker=("leeway_sampler.transports.redis_engine", "RedisWeightTransferEngine"),
)
