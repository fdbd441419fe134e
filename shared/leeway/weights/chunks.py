"""A byte stream as entries of a Redis stream, each with index and digest; read from replicas if configured.

ChunkWriter   bytes -> entries of `chunk_bytes` with ids 1-0, 2-0, ...
ChunkSource   entry by index: from the replicas in turn, from the primary when they lag, fail or are wrong
ByteStream    the verified bytes of a version, which can be read on after an error
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import redis
import xxhash

from leeway.streams import Keys, retrying
from leeway.weights.manifest import WeightManifest, WeightsCorrupt, WeightsTooLarge
from leeway.weights.patience import Patience

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


class ByteStream:
    """The chunks of a version as one stream of verified bytes.

    After an error it goes on where it was: `rewind` returns to the last `mark`, and what was read since then,
    or fetched and not read yet, is not fetched again.
    """

    def __init__(self, keys: Keys, manifest: WeightManifest) -> None:
        self._stream, self._manifest = keys.weight_chunks(*manifest.key), manifest
        self._source: ChunkSource | None = None
        self._patience: Patience | None = None
        self._next = 0
        """Index of the next chunk to fetch."""
        self._rest: deque[memoryview] = deque()
        self._left = 0
        """Bytes in `_rest`."""
        self._read: list[memoryview] = []
        """What was read since the last mark."""

    def resume(self, source: ChunkSource, patience: Patience | None) -> None:
        """Read from `source`, from the last mark on. `patience` is renewed by every chunk.

        The first time, the first chunk is read immediately, so that the number of chunks and their size are
        known to match the manifest before memory is allocated for it. Raises WeightsCorrupt, TimeoutError and
        RedisUnavailable, as does `read`.
        """
        self._source, self._patience = source, patience
        self.rewind()
        if self._next == 0:
            source.check_count(self._stream, self._manifest.chunks, self._manifest.version)
            if self._manifest.chunks:
                self._fetch()

    def _fetch(self) -> None:
        manifest, index = self._manifest, self._next
        assert self._source is not None, "resume comes first"
        if self._patience is not None:
            self._patience.check(
                f"weights version {manifest.version}, before chunk {index} of {manifest.chunks}"
            )
        size = min(manifest.chunk_bytes, manifest.wire_nbytes - index * manifest.chunk_bytes)
        data = self._source.read(self._stream, index, size, manifest.version)
        if self._patience is not None:
            self._patience.renew()
        self._next += 1
        self._rest.append(memoryview(data))
        self._left += size

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes. Raises WeightsCorrupt when the stream has fewer left."""
        while self._left < count:
            if self._next == self._manifest.chunks:
                raise WeightsCorrupt(
                    f"the stream ends {count - self._left} bytes early", version=self._manifest.version
                )
            self._fetch()
        self._left -= count
        parts = []
        while count:
            part = self._rest.popleft()
            if len(part) > count:
                self._rest.appendleft(part[count:])
                part = part[:count]
            parts.append(part)
            count -= len(part)
        self._read += parts
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def mark(self) -> None:
        """What was read so far has had its effect."""
        self._read.clear()

    def rewind(self) -> None:
        """Return to the last mark."""
        self._rest.extendleft(reversed(self._read))
        self._left += sum(len(part) for part in self._read)
        self._read.clear()

    def end(self) -> None:
        """Raise WeightsCorrupt when bytes are left."""
        if self._left or self._next < self._manifest.chunks:
            raise WeightsCorrupt("the stream continues after the last tensor", version=self._manifest.version)


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
