"""The section `weights`."""

from __future__ import annotations

from pydantic import Field

from leeway.config.base import Dtype, Section


class WeightsConfig(Section):
    """The broadcast of new weights."""

    chunk_bytes: int = Field(default=1 << 20, ge=1 << 16, le=4 << 20)
    """Size of the chunks that weights are sent in."""
    dtype: Dtype = "bfloat16"
    """Type of the weights on the wire, which samplers load."""
    transport: str = Field(default="redis", min_length=1)
    """How weights reach samplers. `redis`: through Redis. `nccl`: from the trainer's GPU to the samplers'
    GPUs through vLLM's weight transfer engine, with manifests in Redis; needs NVIDIA GPUs on one fabric and
    vLLM installed with the trainer; not verified yet."""
    nccl_address: str | None = None
    """Address at which samplers reach the trainer's first rank; null: its host name."""
    nccl_port: int = Field(default=29600, ge=1, le=65535)
    """Port of the rendezvous with `transport: nccl`."""
    keyframe_every: int = Field(default=32, ge=1)
    """Every n-th version is sent in full, for samplers that join later; the versions in between contain only
    changes. 1: every version in full."""
    max_redis_mib: int | None = Field(default=None, ge=1)
    """Maximum memory for weights in Redis; null: what is free below the server's maxmemory, minus a tenth. A
    version that does not fit is not published, and the run continues with the old one. A keyframe needs room
    for two whole versions and the deltas between them."""
