"""The manifest of a weight version, and the errors of reading and writing versions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from leeway.errors import LeewayError

WireDtype = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]
ITEM_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

MAX_CHUNK_BYTES = 512 << 20
"""Maximum length of a Redis string."""


class WeightsError(LeewayError):
    """A weight version cannot be written, read or loaded."""


class WeightsNotFinite(WeightsError):
    """`tensor` holds NaN or infinity; the version is not published."""

    def __init__(self, version: int, tensor: str, count: int, numel: int) -> None:
        super().__init__(
            f"weights version {version}: tensor {tensor} has {count} of {numel} values that are NaN or "
            "infinite in the wire dtype; this version is not published"
        )
        self.version, self.tensor, self.count = version, tensor, count


class WeightsVersionRefused(WeightsError):
    """A version that is not above the newest published one."""


class WeightsTooLarge(WeightsError):
    """A version does not fit the memory that Redis has for weights; it is not published."""


class WeightsCorrupt(WeightsError):
    """Chunks, tensors and manifest are inconsistent; `version`, `chunk`, `tensor`: where, if known."""

    def __init__(
        self, reason: str, *, version: int | None, chunk: int | None = None, tensor: str | None = None
    ) -> None:
        where = [f"weights version {'unknown' if version is None else version}"]
        where += [f"chunk {chunk}"] if chunk is not None else []
        where += [f"tensor {tensor}"] if tensor is not None else []
        super().__init__(f"{', '.join(where)}: {reason}")
        self.version, self.chunk, self.tensor, self.reason = version, chunk, tensor, reason


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorSpec(_Wire):
    """One tensor: `nbytes` little-endian bytes at `offset` in the version's byte stream."""

    name: str = Field(min_length=1)
    dtype: WireDtype
    shape: tuple[NonNegativeInt, ...]
    offset: int = Field(ge=0)
    nbytes: int = Field(ge=0)
    digest: str


class Base(_Wire):
    """The version that a delta changes, and the digest of its weights."""

    version: int = Field(ge=0)
    digest: str


class WeightManifest(_Wire):
    """Everything a reader needs to know about one version. Written after its last chunk.

    `tensors`, `nbytes` and `digest` describe the weights themselves. With transport `redis`, `wire_nbytes`
    bytes in `chunks` chunks carry them: the whole (`full`), or what changed since `base` (`delta`). Any other
    transport keeps no bytes in Redis; its `offer` tells samplers how to get the weights, in a form that only
    that transport reads.
    """

    schema_version: Literal[4] = 4
    run: str
    epoch: int = Field(ge=0)
    version: int = Field(ge=0)
    step: int = Field(ge=0)
    config: str = ""
    """Digest of the trainer's configuration; a sampler with another one does not load the version."""
    codec: Literal["full", "delta"] = "full"
    base: Base | None = None
    transport: str = Field(default="redis", min_length=1)
    offer: dict[str, Any] | None = None
    chunk_bytes: int = Field(ge=1, le=MAX_CHUNK_BYTES)
    chunks: int = Field(ge=0)
    wire_nbytes: int = Field(ge=0)
    nbytes: int = Field(ge=0)
    tensors: tuple[TensorSpec, ...]
    digest: str
    traceparent: str | None = None

    @property
    def key(self) -> tuple[int, int]:
        """(run epoch, version): the order in which versions replace each other."""
        return self.epoch, self.version

    def same_layout(self, other: WeightManifest) -> bool:
        """Whether both have the same tensors by name, dtype, shape and order."""
        return [(t.name, t.dtype, t.shape) for t in self.tensors] == [
            (t.name, t.dtype, t.shape) for t in other.tensors
        ]

    @model_validator(mode="after")
    def _adds_up(self) -> WeightManifest:
        offset = 0
        for spec in self.tensors:
            if spec.offset != offset or spec.nbytes != math.prod(spec.shape) * ITEM_BYTES[spec.dtype]:
                raise ValueError(f"tensor {spec.name}: offset or size does not match its shape and position")
            offset += spec.nbytes
        if offset != self.nbytes or self.chunks != -(-self.wire_nbytes // self.chunk_bytes):
            raise ValueError(
                f"{self.nbytes} bytes, {self.wire_nbytes} on the wire in {self.chunks} chunks, do not match "
                f"tensors of {offset} bytes"
            )
        if (self.codec == "delta") != (self.base is not None):
            raise ValueError(f"codec {self.codec} with base {self.base}")
        if self.base is not None and self.base.version >= self.version:
            raise ValueError(f"base version {self.base.version} is not below version {self.version}")
        in_redis = self.transport == "redis"
        if in_redis != (self.offer is None):
            raise ValueError(f"transport {self.transport} with offer {self.offer}")
        if not in_redis and self.wire_nbytes:
            raise ValueError(f"transport {self.transport} with {self.wire_nbytes} bytes in Redis")
        if in_redis and self.codec == "full" and self.wire_nbytes != self.nbytes:
            raise ValueError(f"{self.wire_nbytes} bytes on the wire for {self.nbytes} bytes in full")
        if len({spec.name for spec in self.tensors}) != len(self.tensors):
            raise ValueError("duplicate tensor name")
        if self.digest != weights_digest(self.tensors):
            raise ValueError("the digest does not match the listed tensors")
        return self


def weights_digest(tensors: Sequence[TensorSpec]) -> str:
    """Digest of a set of weights: names, dtypes, shapes and contents, in order; 32 hex digits."""
    state = xxhash.xxh3_128()
    for spec in tensors:
        state.update(f"{spec.name}\n{spec.dtype}\n{spec.shape}\n{spec.digest}\n".encode())
    return state.hexdigest()
