"""Tensors as they travel: their words, their wire type, and their entry in a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast, get_args

import xxhash

from leeway.weights.codec import Words, words
from leeway.weights.manifest import TensorSpec, WeightsError, WireDtype

if TYPE_CHECKING:
    import torch


def wire_words(tensor: torch.Tensor, dtype: str | None = None) -> Words:
    """A tensor's values, flat, as little-endian words; `dtype`: another wire type for floating point."""
    # Imported on use: the controller reads manifests and has no torch.
    import torch

    wire = tensor.detach()
    if dtype is not None and wire.is_floating_point():
        wire = wire.to(getattr(torch, dtype))
    flat = wire.to("cpu").contiguous().reshape(-1)
    return words(flat.view(torch.uint8).numpy(), flat.element_size())


def dtype_name(dtype: torch.dtype | str) -> WireDtype:
    """The name of a dtype on the wire. Raises WeightsError for one that cannot be sent."""
    name, supported = str(dtype).removeprefix("torch."), get_args(WireDtype)
    if name not in supported:
        raise WeightsError(f"tensors of {name} cannot be sent; supported are {', '.join(supported)}")
    return cast(WireDtype, name)


def tensor_spec(name: str, tensor: torch.Tensor, values: Words, dtype: WireDtype) -> TensorSpec:
    """The entry of one tensor whose words on the wire are `values`; `place_specs` sets its offset."""
    return TensorSpec(
        name=name,
        dtype=dtype,
        shape=tuple(tensor.shape),
        offset=0,
        nbytes=values.nbytes,
        digest=xxhash.xxh3_128_hexdigest(values.data),
    )


def tensor_specs(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    """The entries of `tensors`, which already have their wire type. Consumes them one at a time."""
    return place_specs([tensor_spec(n, t, wire_words(t), dtype_name(t.dtype)) for n, t in tensors])


def place_specs(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The same entries with offsets: each tensor follows the one before it."""
    placed, offset = [], 0
    for spec in specs:
        placed.append(spec.model_copy(update={"offset": offset}))
        offset += spec.nbytes
    return placed
