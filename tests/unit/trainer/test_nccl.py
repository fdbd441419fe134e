"""What can be said about the NCCL transport without GPUs: who gets which rank, and who is refused."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from leeway.errors import UsageError
from leeway.messages import SamplerStatus
from leeway.weights import WeightManifest, WeightsCorrupt, weights_digest
from leeway.weights.nccl_offer import nccl_offer
from leeway_trainer.nccl import check_device, plan_offer, tensor_specs


def status(name: str) -> SamplerStatus:
    return SamplerStatus(sampler=name, heartbeat=0.0)


def test_every_worker_has_a_rank_of_its_own() -> None:
    offer = plan_offer([status("b"), status("a")], address="trainer", port=1, tensor_parallel_size=4)
    assert offer.ranks == {"a": 1, "b": 5}
    assert offer.world_size == 9


def test_a_manifest_with_an_offer_carries_no_bytes() -> None:
    specs = tensor_specs([("w", torch.ones(3, 2, dtype=torch.bfloat16)), ("s", torch.tensor(1.0))])
    assert [(s.offset, s.nbytes) for s in specs] == [(0, 12), (12, 4)]
    fields = {
        "run": "r",
        "epoch": 0,
        "version": 1,
        "step": 0,
        "transport": "nccl",
        "chunk_bytes": 1,
        "chunks": 0,
        "wire_nbytes": 0,
        "nbytes": 16,
        "tensors": specs,
        "digest": weights_digest(specs),
    }
    with pytest.raises(ValidationError, match="transport nccl with offer None"):
        WeightManifest(**fields)
    offer = plan_offer([status("a")], address=None, port=1, tensor_parallel_size=1)
    manifest = WeightManifest(**fields, offer=offer.as_offer())
    assert nccl_offer(WeightManifest.model_validate_json(manifest.model_dump_json())) == offer


def test_an_offer_of_another_transport_is_rejected() -> None:
    fields = {
        "run": "r",
        "epoch": 0,
        "version": 1,
        "step": 0,
        "chunk_bytes": 1,
        "chunks": 0,
        "wire_nbytes": 0,
    }
    manifest = WeightManifest(
        **fields, nbytes=0, tensors=(), digest=weights_digest([]), transport="file", offer={"path": "/x"}
    )
    with pytest.raises(WeightsCorrupt, match="version 1: the offer of transport file is not an NCCL offer"):
        nccl_offer(manifest)
    with pytest.raises(ValidationError, match="transport redis with offer {'path'"):
        WeightManifest.model_validate({**manifest.model_dump(), "transport": "redis"})


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="needs NVIDIA GPUs .* runs on cpu: set weights.transport=redis"):
        check_device(torch.device("cpu"))
