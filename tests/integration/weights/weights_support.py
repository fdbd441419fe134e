"""A publisher of successive versions, readers that follow it, and ways to damage stored chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import redis
import torch
import xxhash

from leeway.streams import Keys
from leeway.weights import (
    ChunkSource,
    HostCopy,
    WeightManifest,
    plan_chain,
    publish_weights,
    published_manifests,
)

CHUNK = 300
Tensors = dict[str, torch.Tensor]


def example_tensors(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (7, 33), "a.bias": (33,), "b.weight": (5, 5, 5), "scale": (), "none": (0, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def nudged(tensors: Tensors, seed: int, share: float = 0.3) -> Tensors:
    """Some values changed a little, as an optimiser step does."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in tensors.items():
        hit = torch.rand(tensor.shape, generator=generator) < share
        result[name] = torch.where(hit, tensor * 1.01 + 1e-3, tensor)
    return result


@dataclass
class Publisher:
    """The trainer's side: `send` publishes the next version, as a delta or in full."""

    client: redis.Redis
    keys: Keys
    tensors: Tensors = field(default_factory=example_tensors)
    version: int = 0
    epoch: int = 0
    wire: str = "bfloat16"
    chunk_bytes: int = CHUNK
    sent: list[tuple[WeightManifest, Tensors]] = field(default_factory=list)

    def send(self, tensors: Tensors | None = None, *, full: bool = False, **options: Any) -> WeightManifest:
        self.version += 1
        new = nudged(self.tensors, self.version) if tensors is None else tensors
        base, old = (None, None) if full or not self.sent else self.sent[-1]
        pairs: Any = new.items() if old is None else ((name, new[name], old[name]) for name in new)
        manifest = publish_weights(
            self.client,
            self.keys,
            **{
                "epoch": self.epoch,
                "version": self.version,
                "step": 0,
                "tensors": pairs,
                "base": base,
                "wire_dtype": self.wire,
                "chunk_bytes": self.chunk_bytes,
                **options,
            },
        )
        self.tensors = new
        self.sent.append((manifest, {name: tensor.clone() for name, tensor in new.items()}))
        return manifest


def follow(client: redis.Redis, keys: Keys, copy: HostCopy, wanted: WeightManifest | None = None) -> None:
    """What a sampler does: the shortest chain to the newest version (or `wanted`), applied."""
    published = published_manifests(client, keys)
    newest = published[-1] if wanted is None else wanted
    copy.advance(ChunkSource(client, budget_s=5.0), keys, plan_chain(published, newest.key, copy.held))


def assert_holds(copy: HostCopy, manifest: WeightManifest, tensors: Tensors, wire: str = "bfloat16") -> None:
    """The copy is `manifest`, and its tensors are bit for bit the cast of `tensors`."""
    assert copy.held is not None and (copy.held.key, copy.held.digest) == (manifest.key, manifest.digest)
    got = copy.tensors()
    assert list(got) == list(tensors)
    for name, tensor in tensors.items():
        expected = tensor.to(getattr(torch, wire)) if tensor.is_floating_point() else tensor
        assert (got[name].dtype, got[name].shape) == (expected.dtype, expected.shape)
        flat = expected.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), flat), name


def rewrite(client: redis.Redis, keys: Keys, version: int, change: Any) -> None:
    """Apply `change` to the list of chunk fields of a version and write the stream again."""
    stream = keys.weight_chunks(0, version)
    chunks = [dict(fields) for _, fields in client.xrange(stream)]  # type: ignore[union-attr]
    client.delete(stream)
    for number, fields in enumerate(change(chunks), start=1):
        client.xadd(stream, fields, id=f"{number}-0")


def flip(chunks: list[dict[bytes, bytes]], index: int, forge: bool = False) -> list[dict[bytes, bytes]]:
    """One bit of a chunk; `forge`: under a matching chunk digest, so that only the result can tell."""
    data = bytearray(chunks[index][b"data"])
    data[len(data) // 2] ^= 1
    chunks[index][b"data"] = bytes(data)
    if forge:
        chunks[index][b"digest"] = xxhash.xxh3_128_hexdigest(bytes(data)).encode()
    return chunks
