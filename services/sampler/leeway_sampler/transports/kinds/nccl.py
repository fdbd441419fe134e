"""weights.transport=nccl: workers receive weights from the trainer's GPU, through vLLM's own NCCL engine.

    stage      does the manifest's offer have a rank for this sampler?
    load       join the version's group -> receive -> leave the group

Each version has its own group, so samplers can come and go between versions. There is no copy of the
previous version to put back. NOT VERIFIED: written without access to a machine with several GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leeway.errors import LeewayError, UsageError
from leeway.weights import Patience, WeightManifest
from leeway.weights.nccl_offer import nccl_offer
from leeway_sampler.transports.base import Endpoint, Transport, WeightReceiver, update_weights

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class NoRankError(LeewayError):
    """The group of a version was formed without this sampler."""


def check_platform(is_cuda: bool, name: str) -> None:
    """Raise UsageError where there is no NCCL."""
    if not is_cuda:
        raise UsageError(
            f"weights.transport=nccl needs NVIDIA GPUs, and vLLM runs on {name}: set weights.transport=redis"
        )


def rank_in(manifest: WeightManifest, sampler: str) -> int:
    """Rank of the sampler's first worker. Raises NoRankError for a sampler that is not in the group."""
    ranks = nccl_offer(manifest).ranks
    if sampler not in ranks:
        raise NoRankError(
            f"weights version {manifest.version}: sampler {sampler} has no rank in its group, which consists "
            f"of {', '.join(ranks) or 'no samplers'}; it can join the next version's group"
        )
    return ranks[sampler]


class NcclReceiver(WeightReceiver):
    """Knows no more than the name of its sampler."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.sampler = endpoint.sampler

    def stage(self, manifest: WeightManifest, patience: Patience) -> None:
        """Raises NoRankError and WeightsCorrupt."""
        rank_in(manifest, self.sampler)

    async def load(self, llm: AsyncLLM, manifest: WeightManifest) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        offer = nccl_offer(manifest)
        group = {
            "master_address": offer.address,
            "master_port": offer.port,
            "rank_offset": rank_in(manifest, self.sampler),
            "world_size": offer.world_size,
            "packed": True,
        }
        tensors = {
            "names": [spec.name for spec in manifest.tensors],
            "dtype_names": [spec.dtype for spec in manifest.tensors],
            "shapes": [list(spec.shape) for spec in manifest.tensors],
        }
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=group))
        try:
            await update_weights(llm, tensors, manifest.version)
        finally:
            await llm.shutdown_weight_transfer_engine()


TRANSPORT = Transport(backend="nccl", open=NcclReceiver, check_platform=check_platform)
