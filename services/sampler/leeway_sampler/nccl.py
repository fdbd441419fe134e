"""weights.transport=nccl, the sampler's side: join the group of a version, let vLLM's own engine receive.

NOT VERIFIED: no machine with several GPUs was at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leeway.errors import LeewayError, UsageError
from leeway.weights import WeightManifest
from leeway.weights.nccl_offer import nccl_offer

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class NoPlaceError(LeewayError):
    """The group of a version was formed without this sampler."""


def check_platform(is_cuda: bool, name: str) -> None:
    """Raise UsageError where there is no NCCL."""
    if not is_cuda:
        raise UsageError(
            f"weights.transport=nccl needs NVIDIA GPUs, and vLLM runs on {name}: set weights.transport=redis"
        )


def rank_in(manifest: WeightManifest, sampler: str) -> int:
    """Rank of the sampler's first worker. Raises NoPlaceError for one that came too late."""
    ranks = nccl_offer(manifest).ranks
    if sampler not in ranks:
        raise NoPlaceError(
            f"weights version {manifest.version}: sampler {sampler} has no place in its group, which has "
            f"{', '.join(ranks) or 'no samplers'}"
        )
    return ranks[sampler]


async def receive(llm: AsyncLLM, manifest: WeightManifest, sampler: str) -> None:
    """Load the version from the trainer's GPU. There is no copy to go back to when that fails."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    offer, rank = nccl_offer(manifest), rank_in(manifest, sampler)
    place = {"master_address": offer.address, "master_port": offer.port, "packed": True}
    place |= {"rank_offset": rank, "world_size": offer.world_size}
    info = {
        "names": [spec.name for spec in manifest.tensors],
        "dtype_names": [spec.dtype for spec in manifest.tensors],
        "shapes": [list(spec.shape) for spec in manifest.tensors],
    }
    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=place))
    try:
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        await llm.finish_weight_update(weight_version=str(manifest.version))
    finally:
        await llm.shutdown_weight_transfer_engine()
