"""The sampler's side of the NCCL transport, as far as it can be tested without GPUs."""

from __future__ import annotations

import pytest

from leeway.errors import UsageError
from leeway.weights import Patience, WeightManifest, weights_digest
from leeway.weights.nccl_offer import NcclOffer
from leeway_sampler.transports import TRANSPORTS
from leeway_sampler.transports.base import Endpoint
from leeway_sampler.transports.kinds.nccl import NoRankError, check_platform


def manifest(ranks: dict[str, int]) -> WeightManifest:
    offer = NcclOffer(address="trainer", port=1, world_size=3, ranks=ranks)
    return WeightManifest(
        run="r",
        epoch=0,
        version=4,
        step=0,
        transport="nccl",
        offer=offer.as_offer(),
        chunk_bytes=1,
        chunks=0,
        wire_nbytes=0,
        nbytes=0,
        tensors=(),
        digest=weights_digest([]),
    )


def test_a_sampler_without_a_rank_is_told_who_has_one():
    receiver = TRANSPORTS["nccl"].open(Endpoint(None, "", "r", "s2"))  # type: ignore[arg-type]
    receiver.stage(manifest({"s0": 1, "s2": 2}), Patience(1.0))
    with pytest.raises(NoRankError, match="version 4: sampler s2 has no rank in its group.* of s0, s1"):
        receiver.stage(manifest({"s0": 1, "s1": 2}), Patience(1.0))
    assert receiver.rollback() is None, "there is nothing to put back"


def test_platforms_without_nccl_are_rejected():
    check_platform(True, "cuda")
    with pytest.raises(UsageError, match="vLLM runs on cpu: set weights.transport=redis"):
        check_platform(False, "cpu")
