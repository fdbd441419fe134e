"""The offer of `weights.transport: nccl`: where samplers join the group that carries a version."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leeway.weights.manifest import WeightManifest, WeightsCorrupt


class NcclOffer(BaseModel):
    """The trainer has rank 0, the workers of all samplers have the ranks above it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    address: str
    port: int
    world_size: int = Field(ge=1)
    ranks: dict[str, int]
    """Name of a sampler -> rank of its first worker."""

    def as_offer(self) -> dict[str, Any]:
        """The offer as a manifest carries it."""
        return self.model_dump(mode="json")


def nccl_offer(manifest: WeightManifest) -> NcclOffer:
    """The offer of a version published over NCCL. Raises WeightsCorrupt when the manifest has none."""
    try:
        return NcclOffer.model_validate(manifest.offer)
    except ValidationError as exc:
        problem = exc.errors(include_url=False)[0]
        raise WeightsCorrupt(
            f"the offer of transport {manifest.transport} is not an NCCL offer: "
            f"{problem['loc']} {problem['msg']}",
            version=manifest.version,
        ) from exc
