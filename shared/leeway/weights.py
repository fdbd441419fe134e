"""Wire format of a full weight broadcast through Redis.

    publish_weights                                     read_weights
    tensor -> wire dtype -> finite? -> digest           chunk -> index? digest? -> tensor -> digest?
        \\-> byte stream -> chunks of chunk_bytes            (one chunk and one tensor in memory at a time)
             each: index, digest, bytes  ==> stream weights:<version>
    manifest (last, one JSON field)      ==> stream weights

The tensors lie behind each other in one byte stream that is cut every `chunk_bytes`. Every chunk, every
tensor and the whole carry an xxh3 digest. The digest of the whole covers names, types, shapes and tensor
digests, so that equal weights have equal digests however they were cut or sent.
A reader trusts nothing that is not named by a manifest: a publisher that dies leaves no visible version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import redis
import xxhash
from pydantic import ValidationError

from leeway.streams import Keys, retrying
from leeway.weights_manifest import (
    ITEM_BYTES,
    TensorSpec,
    WeightManifest,
    WeightsCorrupt,
    WeightsError,
    WeightsNotFinite,
    WeightsVersionRefused,
    weights_digest,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "CHUNK_BYTES",
    "TensorSpec",
    "WeightManifest",
    "WeightsCorrupt",
    "WeightsError",
    "WeightsNotFinite",
    "WeightsVersionRefused",
    "free_versions",
    "latest_manifest",
    "parse_manifest",
    "publish_weights",
    "read_weights",
    "verify_weights",
    "weights_digest",
]

CHUNK_BYTES = 1 << 20
MANIFEST_FIELD = b"manifest"
_INDEX, _DIGEST, _DATA = b"index", b"digest", b"data"


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


def publish_weights(
    client: redis.Redis,
    keys: Keys,
    *,
    epoch: int,
    version: int,
    step: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    wire_dtype: torch.dtype | str = "bfloat16",
    chunk_bytes: int = CHUNK_BYTES,
    traceparent: str | None = None,
    budget_s: float = 60.0,
) -> WeightManifest:
    """Publish all weights as `version` of run `epoch`, at optimiser `step`.

    Floating-point tensors travel as `wire_dtype`, others as they are. `tensors` is consumed one at a time;
    memory stays within one tensor and one chunk. Chunks of an earlier attempt at the same version are
    deleted first; an attempt that fails deletes its own. A write waits up to `budget_s` seconds while the
    server is away or out of memory.

    Raises WeightsVersionRefused, WeightsNotFinite (names the tensor), or RedisUnavailable.
    """
    newest = latest_manifest(client, keys)
    if newest is not None and (epoch, version) <= (newest.epoch, newest.version):
        raise WeightsVersionRefused(
            f"weights version {version} of run epoch {epoch} is not above version {newest.version} of epoch "
            f"{newest.epoch}, which is published: versions only rise, and a resumed run needs a higher epoch"
        )
    stream = keys.weight_chunks(version)
    client.unlink(stream)
    writer = _ChunkWriter(client, stream, chunk_bytes, budget_s)
    specs: list[TensorSpec] = []
    committed = False
    try:
        for name, tensor in tensors:
            wire = _to_wire(version, name, tensor, wire_dtype)
            data = memoryview(wire.reshape(-1).view(_torch().uint8).numpy())
            specs.append(
                TensorSpec(
                    name=name,
                    dtype=_dtype_name(wire.dtype),
                    shape=tuple(wire.shape),
                    offset=writer.nbytes,
                    nbytes=len(data),
                    digest=xxhash.xxh3_128_hexdigest(data),
                )
            )
            writer.write(data)
        writer.flush()
        manifest = WeightManifest(
            run=keys.run,
            epoch=epoch,
            version=version,
            step=step,
            chunk_bytes=chunk_bytes,
            chunks=writer.chunks,
            nbytes=writer.nbytes,
            tensors=tuple(specs),
            digest=weights_digest(specs),
            traceparent=traceparent,
        )
        fields: Any = {MANIFEST_FIELD: manifest.model_dump_json()}
        retrying(
            lambda: client.xadd(keys.weights, fields),
            budget_s=budget_s,
            what=f"publishing the manifest of weights version {version}",
        )
        committed = True
        return manifest
    finally:
        if not committed:
            with contextlib.suppress(redis.RedisError):  # the first error is the one to report
                client.unlink(stream)


def read_weights(
    client: redis.Redis, keys: Keys, manifest: WeightManifest
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, CPU tensor of its shape and wire dtype) in the order they were published.

    A tensor is yielded only after its chunks and its own digest were checked; each owns its memory.
    Raises WeightsCorrupt naming version, chunk and tensor when anything is missing, repeated or altered.
    """
    torch = _torch()
    for spec, data in _tensor_bytes(client, keys, manifest):
        dtype = getattr(torch, spec.dtype)
        flat = torch.frombuffer(data, dtype=dtype) if spec.nbytes else torch.empty(0, dtype=dtype)
        yield spec.name, flat.reshape(spec.shape)


def verify_weights(client: redis.Redis, keys: Keys, manifest: WeightManifest) -> str:
    """Read and check every chunk and tensor of a version without keeping them; returns its digest.

    Raises WeightsCorrupt as read_weights does.
    """
    for _ in _tensor_bytes(client, keys, manifest):
        pass
    return manifest.digest


def free_versions(client: redis.Redis, keys: Keys, below: int) -> int:
    """Delete chunks and manifests of all versions lower than `below`; returns how many had chunks."""
    prefix = f"{keys.weights}:"
    freed = 0
    for key in client.scan_iter(match=f"{prefix}*"):
        suffix = key.decode().removeprefix(prefix)
        if suffix.isdecimal() and int(suffix) < below:
            freed += client.unlink(key)
    entries: Any = client.xrange(keys.weights)
    old = [entry_id for entry_id, fields in entries if parse_manifest(fields).version < below]
    if old:
        client.xdel(keys.weights, *old)
    return freed


class _ChunkWriter:
    """Cuts a byte stream into entries of `chunk_bytes` (the last one is shorter) with ids 1-0, 2-0, ..."""

    def __init__(self, client: redis.Redis, stream: str, chunk_bytes: int, budget_s: float) -> None:
        self._client, self._stream = client, stream
        self._chunk_bytes, self._budget_s = chunk_bytes, budget_s
        self._pending = bytearray()
        self.chunks = 0
        self.nbytes = 0

    def write(self, data: memoryview) -> None:
        self.nbytes += len(data)
        while len(data):
            room = self._chunk_bytes - len(self._pending)
            self._pending += data[:room]
            data = data[room:]
            if len(self._pending) == self._chunk_bytes:
                self.flush()

    def flush(self) -> None:
        """Send what is pending as one entry, if anything is."""
        if not self._pending:
            return
        data = bytes(self._pending)
        fields = {_INDEX: self.chunks, _DIGEST: xxhash.xxh3_128_hexdigest(data), _DATA: data}
        retrying(
            lambda: self._add(fields),
            budget_s=self._budget_s,
            what=f"writing chunk {self.chunks} to {self._stream}",
        )
        self.chunks += 1
        self._pending.clear()

    def _add(self, fields: Any) -> None:
        try:
            self._client.xadd(self._stream, fields, id=f"{self.chunks + 1}-0")
        except redis.ResponseError as exc:
            # A repeated write whose first answer was lost: the entry is there, and its digest is checked.
            if "equal or smaller" not in str(exc):
                raise


def _tensor_bytes(
    client: redis.Redis, keys: Keys, manifest: WeightManifest
) -> Iterator[tuple[TensorSpec, bytearray]]:
    """Yield each tensor's verified bytes; raises WeightsCorrupt."""
    chunks = _checked_chunks(client, keys, manifest)
    rest = memoryview(b"")
    for spec in manifest.tensors:
        data = bytearray(spec.nbytes)
        filled = 0
        while filled < spec.nbytes:
            if not len(rest):
                rest = memoryview(next(chunks))
            take = min(len(rest), spec.nbytes - filled)
            data[filled : filled + take] = rest[:take]
            rest, filled = rest[take:], filled + take
        if xxhash.xxh3_128_hexdigest(data) != spec.digest:
            raise WeightsCorrupt("digest differs", version=manifest.version, tensor=spec.name)
        yield spec, data
    for _ in chunks:  # none is left; lets the generator see that the stream ends here too
        raise WeightsCorrupt("bytes after the last tensor", version=manifest.version)


def _checked_chunks(client: redis.Redis, keys: Keys, manifest: WeightManifest) -> Iterator[bytes]:
    """Yield the chunks in order, one read each; index, size and digest checked, none missing, none more."""
    stream, version = keys.weight_chunks(manifest.version), manifest.version
    position = "-"
    for index in range(manifest.chunks):
        entries: Any = client.xrange(stream, min=position, count=1)
        if not entries:
            raise WeightsCorrupt(
                f"missing; {index} of {manifest.chunks} are there", version=version, chunk=index
            )
        entry_id, fields = entries[0]
        position = f"({entry_id.decode()}"
        data = fields.get(_DATA, b"")
        if fields.get(_INDEX) != str(index).encode():
            found = fields.get(_INDEX, b"none").decode(errors="replace")
            raise WeightsCorrupt(f"found index {found} in its place", version=version, chunk=index)
        size = min(manifest.chunk_bytes, manifest.nbytes - index * manifest.chunk_bytes)
        if len(data) != size:
            raise WeightsCorrupt(f"has {len(data)} bytes instead of {size}", version=version, chunk=index)
        if xxhash.xxh3_128_hexdigest(data).encode() != fields.get(_DIGEST):
            raise WeightsCorrupt("digest differs", version=version, chunk=index)
        yield data
    if client.xrange(stream, min=position, count=1):
        raise WeightsCorrupt("more chunks than the manifest names", version=version, chunk=manifest.chunks)


def _to_wire(version: int, name: str, tensor: torch.Tensor, wire_dtype: torch.dtype | str) -> torch.Tensor:
    """The tensor on the CPU in its wire dtype, contiguous and finite."""
    torch = _torch()
    wire = tensor.detach()
    if wire.is_floating_point():
        target = getattr(torch, wire_dtype) if isinstance(wire_dtype, str) else wire_dtype
        wire = wire.to(target)  # before the check: a cast can overflow
        bad = int(wire.numel() - torch.isfinite(wire).sum())
        if bad:
            raise WeightsNotFinite(version, name, bad, wire.numel())
    return wire.to("cpu").contiguous()


def _dtype_name(dtype: torch.dtype) -> Any:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise WeightsError(f"tensors of {name} cannot be sent; supported are {', '.join(ITEM_BYTES)}")
    return name


def _torch() -> Any:
    # Imported on use: the controller reads manifests and has no torch.
    import torch

    return torch
