"""weights.transport=nccl: theta goes from rank 0's GPU to the samplers' workers; Redis carries manifests.

    manifest with an offer (address, port, each sampler's rank) -> Redis
    rank 0 opens the group, samplers join, vLLM's weight transfer engines move the tensors, the group ends

A group belongs to one version, so that samplers can join and leave between versions. The received weights are
not verified: a sampler attests the digest that was announced. Written against vLLM 0.32; NOT VERIFIED,
because no machine with several GPUs was available.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from leeway.config import RunConfig
from leeway.errors import StalledError, UsageError
from leeway.messages import SamplerStatus
from leeway.weights import TensorSpec, WeightManifest
from leeway.weights.nccl_offer import NcclOffer
from leeway.weights.tensors import tensor_specs
from leeway_trainer.ranks import Ranks
from leeway_trainer.transports.base import Link, NewVersion, Transport

POLL_S = 0.2


class NcclTransport(Transport):
    """A group of trainer and samplers per version."""

    def check(self, config: RunConfig, ranks: Ranks) -> None:
        """Raise UsageError where there is no NCCL."""
        if ranks.device.type != "cuda":
            raise UsageError(
                f"weights.transport=nccl needs NVIDIA GPUs for trainer and samplers, and the trainer runs on "
                f"{ranks.device.type}: set weights.transport=redis"
            )

    def publish(self, new: NewVersion, link: Link) -> WeightManifest | None:
        """See Transport. Raises StalledError when no sampler is there to receive the weights."""
        specs = tensor_specs(new.tensors())
        weights, first = link.config.weights, link.ranks.first
        offer = plan_offer(
            wait_for_samplers(link, first=new.base is None) if first else [],
            address=weights.nccl_address,
            port=weights.nccl_port,
            tensor_parallel_size=link.config.sampler.tensor_parallel_size,
        )
        manifest = link.announce(new, offer.as_offer(), specs) if first else None
        send(offer, specs, new.tensors(), link.ranks.rank)
        return manifest


def wait_for_samplers(link: Link, *, first: bool) -> list[SamplerStatus]:
    """Live samplers, at least one; for the first version, as many as the run starts with.

    Waits for: samplers' heartbeats. Budget: sampler.start_timeout_s, then StalledError.
    """
    deadline = time.monotonic() + link.config.sampler.start_timeout_s
    wanted = link.config.sampler.replicas if first else 1
    while len(found := link.live_samplers()) < wanted:
        if time.monotonic() > deadline:
            raise StalledError(
                f"{len(found)} of {wanted} samplers are ready to receive weights over NCCL after "
                f"{link.config.sampler.start_timeout_s:.0f} s (sampler.start_timeout_s)"
            )
        time.sleep(POLL_S)
    return found


def plan_offer(
    samplers: Iterable[SamplerStatus], *, address: str | None, port: int, tensor_parallel_size: int
) -> NcclOffer:
    """Ranks 1, 2, ... for the workers of all live samplers, by name; rank 0 is the trainer's.

    `address`: None stands for this machine's host name.
    """
    names = sorted(status.sampler for status in samplers)
    return NcclOffer(
        address=address or socket.gethostname(),
        port=port,
        world_size=1 + len(names) * tensor_parallel_size,
        ranks={name: 1 + at * tensor_parallel_size for at, name in enumerate(names)},
    )


def send(
    offer: NcclOffer, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], rank: int
) -> None:
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

    class Source(WeightSource):  # type: ignore[misc]  # vLLM is not analysed
        def metadata(self) -> list[Any]:
            return [ParamMeta(spec.name, getattr(torch, spec.dtype), spec.shape) for spec in specs]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(tensors)

    info = NCCLTrainerInitInfo(offer.address, offer.port, offer.world_size, rank=rank)
    engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=_NoCalls(), source=Source())
    try:
        engine.send_weights()
    finally:
        if engine.model_update_group is not None:
            engine.model_update_group.destroy()


class _NoCalls:
    """vLLM's client of a sampler. Samplers follow the manifest on their own, so it calls nobody."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


TRANSPORT = NcclTransport()
