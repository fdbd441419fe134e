"""weights.transport=nccl: theta goes straight from rank 0 to the samplers' workers; Redis carries manifests.

    manifest with an offer (address, port, who has which rank) -> Redis
    rank 0 opens the group, samplers join, vLLM's own engines move the tensors, the group ends

A group belongs to one version, so that samplers can come and go between versions. What arrives is not
verified: a sampler attests the digest that was announced. Written against vLLM 0.32; NOT VERIFIED, because
no machine with several GPUs was at hand.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor

from leeway.errors import UsageError
from leeway.messages import SamplerStatus
from leeway.weights import TensorSpec
from leeway.weights.nccl_offer import NcclOffer
from leeway.weights.publish import wire_words


def check_device(device: torch.device) -> None:
    """Raise UsageError where there is no NCCL."""
    if device.type != "cuda":
        raise UsageError(
            f"weights.transport=nccl needs NVIDIA GPUs for trainer and samplers, and the trainer runs on "
            f"{device.type}: set weights.transport=redis"
        )


def plan_offer(
    samplers: Iterable[SamplerStatus], *, address: str | None, port: int, tensor_parallel_size: int
) -> NcclOffer:
    """Ranks 1, 2, ... for the workers of all live samplers, by name; rank 0 is the trainer's."""
    names = sorted(status.sampler for status in samplers)
    return NcclOffer(
        address=address or socket.gethostname(),
        port=port,
        world_size=1 + len(names) * tensor_parallel_size,
        ranks={name: 1 + at * tensor_parallel_size for at, name in enumerate(names)},
    )


def tensor_specs(tensors: Iterable[tuple[str, Tensor]]) -> list[TensorSpec]:
    """Names, shapes, types and digests of what will be sent."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, tensor in tensors:
        words = wire_words(tensor)
        specs.append(
            TensorSpec(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                offset=offset,
                nbytes=words.nbytes,
                digest=xxhash.xxh3_128_hexdigest(words.data),
            )
        )
        offset += words.nbytes
    return specs


def send(offer: NcclOffer, specs: list[TensorSpec], tensors: Iterable[tuple[str, Tensor]], rank: int) -> None:
    """Broadcast `tensors` to the samplers of `offer`; every trainer rank walks, rank 0 sends."""
    try:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )
    except ImportError as exc:
        raise UsageError(
            f"weights.transport=nccl needs vLLM in the trainer's environment too ({exc}): install "
            "leeway-rl[sampler,trainer], or set weights.transport=redis"
        ) from exc

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(spec.name, getattr(torch, spec.dtype), spec.shape) for spec in specs]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(tensors)

    info = NCCLTrainerInitInfo(offer.address, offer.port, offer.world_size, rank=rank)
    engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=_Manifested(), source=Source())
    try:
        engine.send_weights()
    finally:
        if engine.model_update_group is not None:
            engine.model_update_group.destroy()


class _Manifested:
    """Samplers follow the manifest by themselves: there is nobody to call."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
