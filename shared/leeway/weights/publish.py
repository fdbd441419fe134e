"""Publishing a weight version: tensors in, chunks and a manifest out, memory bounded by one tensor.

    tensor -> wire dtype -> finite? -> digest
           -> its bytes (full), or records against the old tensor (delta) -> chunks
    chunks          => weights:<epoch>.<version>
    manifest (last) => weights, one JSON field, with the id <epoch>-<version + 1>

The tensors follow each other in one byte stream that is cut every `chunk_bytes`. Every chunk, every tensor
and the version as a whole carry an xxh3 digest. The version's digest covers names, types, shapes and tensor
digests, so equal weights have equal digests however they are encoded, cut or sent.
Readers ignore everything that no manifest names: a publisher that dies leaves no visible version.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import redis
from pydantic import ValidationError

from leeway.streams import PUBLISHED_FIELD, Keys, SupersededError, retrying, write_in_epoch
from leeway.weights.chunks import ChunkWriter
from leeway.weights.codec import count_not_finite, encode_piece, pieces
from leeway.weights.manifest import (
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
from leeway.weights.tensors import dtype_name, place_specs, tensor_spec, wire_words

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 1 << 20
MANIFEST_FIELD = b"manifest"
CHUNKS_OF = re.compile(r"(\d+)\.(\d+)")
"""What follows the colon in the name of a stream of chunks."""
Tensors = Iterable["tuple[str, torch.Tensor] | tuple[str, torch.Tensor, torch.Tensor]"]
"""(name, tensor) for a full version, (name, tensor, tensor of the base version) for a delta."""


def parse_manifest(fields: Mapping[bytes, bytes]) -> WeightManifest:
    """The manifest in an entry of stream `weights`. Raises WeightsCorrupt when it is invalid."""
    try:
        return WeightManifest.model_validate_json(fields[MANIFEST_FIELD])
    except KeyError:
        raise WeightsCorrupt(
            f"an entry of stream weights has no manifest but fields {sorted(fields)}", version=None
        ) from None
    except ValidationError as exc:
        problem = exc.errors(include_url=False)[0]
        raise WeightsCorrupt(f"manifest: {problem['loc']} {problem['msg']}", version=None) from exc


def latest_manifest(client: redis.Redis, keys: Keys) -> WeightManifest | None:
    """The newest published version, or None before the first."""
    published = published_manifests(client, keys)
    return published[-1] if published else None


def published_manifests(client: redis.Redis, keys: Keys) -> list[WeightManifest]:
    """Every version that can be read, oldest first: by run epoch and version, not by arrival."""
    entries: Any = client.xrange(keys.weights)
    return sorted((parse_manifest(fields) for _, fields in entries), key=lambda manifest: manifest.key)


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
    config: str = "",
    traceparent: str | None = None,
    budget_s: float = 60.0,
) -> WeightManifest:
    """Publish all weights as `version` of run `epoch`, at optimiser `step`.

    `config`: digest of the configuration that the version belongs to.

    With `base`, the version before, only the changes are sent; `tensors` then yields the old tensors too,
    which must be those of `base`. Floating-point tensors travel as `wire_dtype`, others as they are.
    `tensors` is consumed one at a time. Chunks of an earlier attempt at the same version are deleted first; a
    failed attempt deletes its chunks. A write is retried for up to `budget_s` seconds while the server is
    away or out of memory.

    Raises WeightsVersionRefused, SupersededError, WeightsNotFinite (names the tensor), WeightsTooLarge (more
    than `limit_bytes` bytes) or RedisUnavailable; the version is not published then.
    """
    _check_rises(client, keys, epoch, version, budget_s)
    stream = keys.weight_chunks(epoch, version)

    def empty() -> None:
        client.sadd(keys.weight_streams, stream)
        client.unlink(stream)

    retrying(empty, budget_s=budget_s, what=f"emptying {stream}")
    writer = ChunkWriter(client, stream, chunk_bytes, budget_s, limit_bytes)
    committed = False
    try:
        specs = place_specs([_send(writer, version, wire_dtype, *item) for item in tensors])
        writer.flush()
        manifest = WeightManifest(
            run=keys.run,
            epoch=epoch,
            version=version,
            step=step,
            config=config,
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
                client.srem(keys.weight_streams, stream)


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
    config: str = "",
    traceparent: str | None = None,
    budget_s: float = 60.0,
) -> WeightManifest:
    """Publish the manifest of a version whose weights do not travel through Redis but by `transport`.

    `offer` tells that transport on the samplers' side how to get the weights described by `specs`; it must be
    JSON. Raises WeightsVersionRefused, SupersededError, or RedisUnavailable after `budget_s` seconds.
    """
    _check_rises(client, keys, epoch, version, budget_s)
    manifest = WeightManifest(
        run=keys.run,
        epoch=epoch,
        version=version,
        step=step,
        config=config,
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


def _check_rises(client: redis.Redis, keys: Keys, epoch: int, version: int, budget_s: float) -> None:
    newest = retrying(
        lambda: latest_manifest(client, keys), budget_s=budget_s, what="reading the newest weight version"
    )
    if newest is not None and newest.epoch > epoch:
        raise SupersededError(newest.epoch, epoch)
    if newest is not None and (epoch, version) <= newest.key:
        raise WeightsVersionRefused(
            f"weights version {version} of run epoch {epoch} is not above version {newest.version} of epoch "
            f"{newest.epoch}, which is published: versions only rise, and a resumed run needs a higher epoch"
        )


def _announce(client: redis.Redis, keys: Keys, manifest: WeightManifest, budget_s: float) -> None:
    fields: Any = {MANIFEST_FIELD: manifest.model_dump_json()}
    # In order whatever the server's clock says: a reader never has a newer version behind its position.
    entry_id = f"{manifest.epoch}-{manifest.version + 1}"

    def effects(pipe: Any) -> None:
        pipe.xadd(keys.weights, fields, id=entry_id)
        pipe.hset(keys.state, PUBLISHED_FIELD, f"{manifest.epoch}.{manifest.version}")

    try:
        write_in_epoch(
            client,
            keys,
            manifest.epoch,
            effects,
            budget_s=budget_s,
            what=f"publishing the manifest of weights version {manifest.version}",
        )
    except redis.ResponseError as exc:
        # A repeated write whose first reply was lost.
        newest = retrying(
            lambda: latest_manifest(client, keys), budget_s=budget_s, what="reading the newest weight version"
        )
        if "equal or smaller" not in str(exc) or newest != manifest:
            raise


def free_versions(
    client: redis.Redis,
    keys: Keys,
    versions: Sequence[WeightManifest],
    *,
    epoch: int,
    budget_s: float = 60.0,
) -> int:
    """Delete chunks and manifests of `versions`, and chunks without a manifest; returns how many streams.

    Leaves alone what belongs to a run epoch above `epoch`. Raises SupersededError, RedisUnavailable.
    """
    gone = {manifest.key for manifest in versions}
    entries: Any = client.xrange(keys.weights)
    manifests = {entry_id: parse_manifest(fields) for entry_id, fields in entries}
    kept = {manifest.key for manifest in manifests.values()} - gone
    old = [entry_id for entry_id, manifest in manifests.items() if manifest.key in gone]
    if old:  # before the chunks: a manifest never names missing chunks
        write_in_epoch(
            client,
            keys,
            epoch,
            lambda pipe: pipe.xdel(keys.weights, *old),
            budget_s=budget_s,
            what="deleting manifests",
        )
    freed = 0
    prefix = f"{keys.weights}:"
    streams: Any = client.smembers(keys.weight_streams)
    for key in streams:
        found = CHUNKS_OF.fullmatch(key.decode().removeprefix(prefix))
        if found is None:
            continue
        version = int(found[1]), int(found[2])
        if version not in kept and version[0] <= epoch:
            freed += client.unlink(key)
            client.srem(keys.weight_streams, key)
    return freed


def _send(
    writer: ChunkWriter,
    version: int,
    float_dtype: torch.dtype | str,
    name: str,
    tensor: torch.Tensor,
    old: torch.Tensor | None = None,
) -> TensorSpec:
    dtype = dtype_name(float_dtype if tensor.is_floating_point() else tensor.dtype)
    new = wire_words(tensor, dtype)
    bad = count_not_finite(new, dtype)  # after the cast, which can overflow
    if bad:
        raise WeightsNotFinite(version, name, bad, new.size)
    if old is None:
        writer.write(new.data.cast("B") if new.size else b"")
    else:
        before = wire_words(old, dtype)
        if before.size != new.size:
            raise WeightsError(f"weights version {version}: tensor {name} and its base differ in size")
        for piece in pieces(new.size):
            writer.write(encode_piece(before[piece], new[piece]))
    return tensor_spec(name, tensor, new, dtype)
