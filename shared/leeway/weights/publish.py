"""Publishing a weight version: tensors in, chunks and a manifest out, memory bounded by one tensor.

    tensor -> wire dtype -> finite? -> digest
           -> its bytes (full), or records against the old tensor (delta) -> chunks ==> weights:<version>
    manifest (last, one JSON field)                                                 ==> weights

The tensors lie behind each other in one byte stream that is cut every `chunk_bytes`. Every chunk, every
tensor and the whole carry an xxh3 digest. The digest of the whole covers names, types, shapes and tensor
digests, so that equal weights have equal digests however they were encoded, cut or sent.
A reader trusts nothing that is not named by a manifest: a publisher that dies leaves no visible version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import redis
import xxhash
from pydantic import ValidationError

from leeway.streams import Keys, retrying
from leeway.weights.chunks import ChunkWriter
from leeway.weights.codec import Words, count_not_finite, encode_piece, pieces, words
from leeway.weights.manifest import (
    ITEM_BYTES,
    Base,
    TensorSpec,
    WeightManifest,
    WeightsCorrupt,
    WeightsError,
    WeightsNotFinite,
    WeightsTooLarge,
    WeightsVersionRefused,
    weights_digest,
)

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 1 << 20
MANIFEST_FIELD = b"manifest"
Tensors = Iterable["tuple[str, torch.Tensor] | tuple[str, torch.Tensor, torch.Tensor]"]
"""(name, tensor) for a full version, (name, tensor, tensor of the base version) for a delta."""


def parse_manifest(fields: Mapping[bytes, bytes]) -> WeightManifest:
    """The manifest in an entry of stream `weights`. Raises WeightsCorrupt when it does not add up."""
    try:
        return WeightManifest.model_validate_json(fields[MANIFEST_FIELD])
    except KeyError:
        raise WeightsCorrupt(f"an entry without a manifest, fields {sorted(fields)}", version=None) from None
    except ValidationError as exc:
        problem = exc.errors(include_url=False)[0]
        raise WeightsCorrupt(f"manifest: {problem['loc']} {problem['msg']}", version=None) from exc


def latest_manifest(client: redis.Redis, keys: Keys) -> WeightManifest | None:
    """The newest published version, or None before the first."""
    entries: Any = client.xrevrange(keys.weights, count=1)
    return parse_manifest(entries[0][1]) if entries else None


def published_manifests(client: redis.Redis, keys: Keys) -> list[WeightManifest]:
    """Every version that can be read, oldest first."""
    entries: Any = client.xrange(keys.weights)
    return [parse_manifest(fields) for _, fields in entries]


def publish_weights(
    client: redis.Redis,
    keys: Keys,
    *,
    epoch: int,
    version: int,
    step: int,
    tensors: Tensors,
    base: WeightManifest | None = None,
    wire_dtype: torch.dtype | str = "bfloat16",
    chunk_bytes: int = CHUNK_BYTES,
    limit_bytes: int | None = None,
    traceparent: str | None = None,
    budget_s: float = 60.0,
) -> WeightManifest:
    """Publish all weights as `version` of run `epoch`, at optimiser `step`.

    With `base`, the version before, only what changed is sent, and `tensors` gives the old tensors too,
    which must be what `base` holds. Floating-point tensors travel as `wire_dtype`, others as they are.
    `tensors` is consumed one at a time. Chunks of an earlier attempt at the same version are deleted first;
    an attempt that fails deletes its own. A write waits up to `budget_s` seconds while the server is away or
    out of memory.

    Raises WeightsVersionRefused, WeightsNotFinite (names the tensor), WeightsTooLarge (more than
    `limit_bytes` bytes) or RedisUnavailable; nothing is published then.
    """
    newest = latest_manifest(client, keys)
    if newest is not None and (epoch, version) <= newest.key:
        raise WeightsVersionRefused(
            f"weights version {version} of run epoch {epoch} is not above version {newest.version} of epoch "
            f"{newest.epoch}, which is published: versions only rise, and a resumed run needs a higher epoch"
        )
    stream = keys.weight_chunks(version)
    client.unlink(stream)
    writer = ChunkWriter(client, stream, chunk_bytes, budget_s, limit_bytes)
    committed = False
    try:
        specs = _placed([_send(writer, version, wire_dtype, *item) for item in tensors])
        writer.flush()
        manifest = WeightManifest(
            run=keys.run,
            epoch=epoch,
            version=version,
            step=step,
            codec="full" if base is None else "delta",
            base=None if base is None else Base(version=base.version, digest=base.digest),
            chunk_bytes=chunk_bytes,
            chunks=writer.chunks,
            wire_nbytes=writer.nbytes,
            nbytes=sum(spec.nbytes for spec in specs),
            tensors=tuple(specs),
            digest=weights_digest(specs),
            traceparent=traceparent,
        )
        if base is not None and not manifest.same_layout(base):
            raise WeightsError(
                f"weights version {version}: other tensors than those of version {base.version}"
            )
        _announce(client, keys, manifest, budget_s)
        committed = True
        return manifest
    except WeightsTooLarge as exc:
        raise WeightsTooLarge(f"weights version {version}: {exc}") from exc
    finally:
        if not committed:
            with contextlib.suppress(redis.RedisError):  # the first error is the one to report
                client.unlink(stream)


def publish_offer(
    client: redis.Redis,
    keys: Keys,
    *,
    transport: str,
    offer: dict[str, Any],
    specs: Sequence[TensorSpec],
    epoch: int,
    version: int,
    step: int,
    traceparent: str | None = None,
    budget_s: float = 60.0,
) -> WeightManifest:
    """Publish the manifest of a version whose weights do not travel through Redis but by `transport`.

    `offer` tells that transport on the samplers' side how to get the weights described by `specs`; it must be
    JSON. Raises RedisUnavailable after `budget_s` seconds.
    """
    manifest = WeightManifest(
        run=keys.run,
        epoch=epoch,
        version=version,
        step=step,
        transport=transport,
        offer=offer,
        chunk_bytes=1,
        chunks=0,
        wire_nbytes=0,
        nbytes=sum(spec.nbytes for spec in specs),
        tensors=tuple(specs),
        digest=weights_digest(specs),
        traceparent=traceparent,
    )
    _announce(client, keys, manifest, budget_s)
    return manifest


def _announce(client: redis.Redis, keys: Keys, manifest: WeightManifest, budget_s: float) -> None:
    fields: Any = {MANIFEST_FIELD: manifest.model_dump_json()}
    retrying(
        lambda: client.xadd(keys.weights, fields),
        budget_s=budget_s,
        what=f"publishing the manifest of weights version {manifest.version}",
    )


def free_versions(client: redis.Redis, keys: Keys, versions: Sequence[WeightManifest]) -> int:
    """Delete chunks and manifests of `versions`, and chunks that no manifest names; returns how many."""
    gone = {manifest.key for manifest in versions}
    entries: Any = client.xrange(keys.weights)
    manifests = {entry_id: parse_manifest(fields) for entry_id, fields in entries}
    # A resumed run may use a number again; its chunks are then those of the higher epoch.
    kept = {manifest.version for manifest in manifests.values() if manifest.key not in gone}
    prefix = f"{keys.weights}:"
    freed = 0
    old = [entry_id for entry_id, manifest in manifests.items() if manifest.key in gone]
    if old:  # before the chunks: what a manifest names is there
        client.xdel(keys.weights, *old)
    for key in client.scan_iter(match=f"{prefix}*"):
        suffix = key.decode().removeprefix(prefix)
        if suffix.isdecimal() and int(suffix) not in kept:
            freed += client.unlink(key)
    return freed


def wire_words(tensor: torch.Tensor, dtype: str | None = None) -> Words:
    """A tensor's values, flat, as little-endian words; `dtype`: another wire type for floating point."""
    torch = _torch()
    wire = tensor.detach()
    if dtype is not None and wire.is_floating_point():
        wire = wire.to(getattr(torch, dtype))
    flat = wire.to("cpu").contiguous().reshape(-1)
    return words(flat.view(torch.uint8).numpy(), flat.element_size())


def _send(
    writer: ChunkWriter,
    version: int,
    wire_dtype: torch.dtype | str,
    name: str,
    tensor: torch.Tensor,
    old: torch.Tensor | None = None,
) -> TensorSpec:
    wire_name = str(wire_dtype).removeprefix("torch.")
    dtype = wire_name if tensor.is_floating_point() else _dtype_name(tensor.dtype)
    new = wire_words(tensor, dtype)
    bad = count_not_finite(new, dtype)  # after the cast, which can overflow
    if bad:
        raise WeightsNotFinite(version, name, bad, new.size)
    if old is None:
        writer.write(new.data.cast("B") if new.size else b"")
    else:
        before = wire_words(old, dtype)
        if before.size != new.size:
            raise WeightsError(f"weights version {version}: tensor {name} has another size than in its base")
        for piece in pieces(new.size):
            writer.write(encode_piece(before[piece], new[piece]))
    return TensorSpec(
        name=name,
        dtype=_dtype_name(dtype),
        shape=tuple(tensor.shape),
        offset=0,  # see _placed
        nbytes=new.nbytes,
        digest=xxhash.xxh3_128_hexdigest(new.data),
    )


def _placed(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The same tensors one behind the other."""
    placed, offset = [], 0
    for spec in specs:
        placed.append(spec.model_copy(update={"offset": offset}))
        offset += spec.nbytes
    return placed


def _dtype_name(dtype: torch.dtype | str) -> Any:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise WeightsError(f"tensors of {name} cannot be sent; supported are {', '.join(ITEM_BYTES)}")
    return name


def _torch() -> Any:
    # Imported on use: the controller reads manifests and has no torch.
    import torch

    return torch
