"""A byte stream as entries of a Redis stream, each with index and digest; read from replicas if configured.

ChunkWriter   bytes -> entries of `chunk_bytes` with ids 1-0, 2-0, ...
ChunkSource   entry by index: from the replicas in turn, from the primary when they lag, fail or are wrong
read_chunks   the verified bytes of a version, chunk by chunk
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import redis
import xxhash

from leeway.streams import Keys, retrying
from leeway.weights.manifest import WeightManifest, WeightsCorrupt, WeightsTooLarge

log = logging.getLogger(__name__)
_INDEX, _DIGEST, _DATA = b"index", b"digest", b"data"
LAG_S = 1.0
"""How long to wait for a lagging replica before a chunk is read elsewhere."""
AVOID_S = 30.0
"""How long a replica that failed is not used."""


class ChunkWriter:
    """Cuts a byte stream into entries of `chunk_bytes` (the last one may be shorter).

    Raises WeightsTooLarge instead of writing more than `limit_bytes` (None: any number).
    """

    def __init__(
        self, client: redis.Redis, stream: str, chunk_bytes: int, budget_s: float, limit_bytes: int | None
    ) -> None:
        self._client, self._stream = client, stream
        self._chunk_bytes, self._budget_s, self._limit_bytes = chunk_bytes, budget_s, limit_bytes
        self._pending = bytearray()
        self.chunks = 0
        self.nbytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self.nbytes += len(data)
        if self._limit_bytes is not None and self.nbytes > self._limit_bytes:
            raise WeightsTooLarge(f"{self.nbytes} bytes exceed the limit of {self._limit_bytes}")
        data = memoryview(data)
        while len(data):
            room = self._chunk_bytes - len(self._pending)
            self._pending += data[:room]
            data = data[room:]
            if len(self._pending) == self._chunk_bytes:
                self.flush()

    def flush(self) -> None:
        """Write the pending bytes, if any, as one entry."""
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
            # A retried write whose first reply was lost: the entry exists, and readers check its digest.
            if "equal or smaller" not in str(exc):
                raise


class ChunkSource:
    """Reads chunks from `replicas` in turn, and from `primary` what they do not have."""

    def __init__(
        self, primary: redis.Redis, replicas: Sequence[redis.Redis] = (), *, budget_s: float = 60.0
    ) -> None:
        self._primary, self._replicas, self._budget_s = primary, list(replicas), budget_s
        self._avoid: dict[int, float] = {}
        self.read_bytes = {"replica": 0, "primary": 0}

    def read(self, stream: str, index: int, size: int, version: int) -> bytes:
        """The `size` bytes of chunk `index`. Raises WeightsCorrupt, or RedisUnavailable after the budget."""
        for number, replica in enumerate(self._replicas):
            if time.monotonic() < self._avoid.get(number, 0.0):
                continue
            try:
                data = _checked(self._patient(replica, stream, index), index, size, version)
            except (redis.RedisError, WeightsCorrupt) as exc:
                log.warning("replica %d of redis.read_urls: %s; reading from another server", number, exc)
                self._avoid[number] = time.monotonic() + AVOID_S
                continue
            self.read_bytes["replica"] += len(data)
            return data
        fields = retrying(
            lambda: _entry(self._primary, stream, index),
            budget_s=self._budget_s,
            what=f"reading chunk {index} of {stream}",
        )
        data = _checked(fields, index, size, version)
        self.read_bytes["primary"] += len(data)
        return data

    def _patient(self, replica: redis.Redis, stream: str, index: int) -> dict[bytes, bytes] | None:
        deadline = time.monotonic() + LAG_S
        while (fields := _entry(replica, stream, index)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return fields

    def check_count(self, stream: str, chunks: int, version: int) -> None:
        """Raise WeightsCorrupt when the stream does not hold exactly `chunks` chunks."""
        found = retrying(
            lambda: self._primary.xlen(stream), budget_s=self._budget_s, what=f"counting chunks of {stream}"
        )
        if found != chunks:
            raise WeightsCorrupt(
                f"found {found} chunks, expected {chunks} according to the manifest", version=version
            )


def read_chunks(
    source: ChunkSource, keys: Keys, manifest: WeightManifest, deadline: float | None = None
) -> Iterator[bytes]:
    """Yield the chunks in order, after checking their number, indices, sizes and digests.

    Raises WeightsCorrupt, and TimeoutError once time.monotonic() exceeds `deadline`.
    """
    stream, version = keys.weight_chunks(*manifest.key), manifest.version
    source.check_count(stream, manifest.chunks, version)
    for index in range(manifest.chunks):
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(
                f"weights version {version}: timed out before chunk {index} of {manifest.chunks}"
            )
        size = min(manifest.chunk_bytes, manifest.wire_nbytes - index * manifest.chunk_bytes)
        yield source.read(stream, index, size, version)


class ByteStream:
    """Chunks as one stream of bytes.

    The first chunk is read immediately, so that the number of chunks and their size are known to match the
    manifest before memory is allocated for it.
    """

    def __init__(self, chunks: Iterator[bytes], version: int) -> None:
        self._chunks, self._version = chunks, version
        self._rest = memoryview(next(chunks, b""))

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes. Raises WeightsCorrupt when the stream has fewer left."""
        parts = []
        while count:
            if not len(self._rest):
                chunk = next(self._chunks, None)
                if chunk is None:
                    raise WeightsCorrupt(f"the stream ends {count} bytes early", version=self._version)
                self._rest = memoryview(chunk)
            parts.append(self._rest[:count])
            count -= len(parts[-1])
            self._rest = self._rest[len(parts[-1]) :]
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def end(self) -> None:
        """Raise WeightsCorrupt when bytes are left."""
        if len(self._rest) or next(self._chunks, None) is not None:
            raise WeightsCorrupt("the stream continues after the last tensor", version=self._version)


def _entry(client: redis.Redis, stream: str, index: int) -> dict[bytes, bytes] | None:
    # By id: one lookup per chunk, wherever the chunk before it was read.
    found: Any = client.xrange(stream, min=f"{index + 1}-0", count=1)
    return found[0][1] if found else None


def _checked(fields: dict[bytes, bytes] | None, index: int, size: int, version: int) -> bytes:
    if fields is None:
        raise WeightsCorrupt("missing", version=version, chunk=index)
    data = fields.get(_DATA, b"")
    if fields.get(_INDEX) != str(index).encode():
        found = fields.get(_INDEX, b"none").decode(errors="replace")
        raise WeightsCorrupt(f"found index {found} instead", version=version, chunk=index)
    if len(data) != size:
        raise WeightsCorrupt(f"has {len(data)} bytes, expected {size}", version=version, chunk=index)
    if xxhash.xxh3_128_hexdigest(data).encode() != fields.get(_DIGEST):
        raise WeightsCorrupt("digest mismatch", version=version, chunk=index)
    return data
