"""HostCopy: a reader's copy of the weights, always exactly one version, verified by its digest.

    advance(chain)   apply a keyframe or deltas, piece by piece, and check each digest -> a newer version
                     | interrupted -> the next advance with the same chain, or a longer one, goes on there
                     | any other error -> the version before, bit for bit
    undo()           restore the version before the last advance
    keep()           discard what undo needs

The copy is anonymous memory (memfd) that other processes on this machine can map by `path`, so that the
workers of a tensor-parallel engine share it. It is changed in place; a journal of the flipped bits, in memory
or, when large, in a temporary file, leads back. Memory: the weights once in their wire type; while they
change, one chunk, one piece and at most JOURNAL_BYTES more.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from itertools import islice
from types import TracebackType
from typing import IO, TYPE_CHECKING

import numpy as np
import xxhash

from leeway.streams import Keys, RedisUnavailable
from leeway.weights.chunks import ByteStream, ChunkSource
from leeway.weights.codec import (
    Changes,
    RecordError,
    Words,
    changes,
    decode_piece,
    pieces,
    read_record,
    words,
)
from leeway.weights.manifest import ITEM_BYTES, TensorSpec, WeightManifest, WeightsCorrupt
from leeway.weights.patience import FetchCancelled, Patience
from leeway.weights.unfinished import Unfinished

if TYPE_CHECKING:
    import torch

JOURNAL_BYTES = 16 << 20
_PLACE = struct.Struct("<QQBI")
"""Header of a journal entry: offset of the piece in the buffer, words, bytes per word, flipped words."""


class _Buffer:
    """Anonymous shared memory."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("leeway-weights", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, max(nbytes, 1))
        self.map = mmap.mmap(self.fd, max(nbytes, 1))
        self.bytes = np.frombuffer(self.map, dtype=np.uint8, count=nbytes)

    def close(self) -> None:
        os.close(self.fd)  # the mapping ends with its last view


class HostCopy:
    """See the module's docstring. Not thread-safe."""

    def __init__(self) -> None:
        self.held: WeightManifest | None = None
        """The version in the copy; None before the first."""
        self._buffer: _Buffer | None = None
        self._aside: _Buffer | None = None
        self._before: WeightManifest | None = None
        self._journal: IO[bytes] | None = None
        self._unfinished: Unfinished | None = None

    @property
    def path(self) -> str:
        """Path under which other processes of this user on this machine can map the copy."""
        self._give_up_unfinished()
        assert self._buffer is not None, "nothing is held yet"
        return f"/proc/{os.getpid()}/fd/{self._buffer.fd}"

    def tensor_words(self, spec: TensorSpec) -> Words:
        """The values of one tensor as words; a view."""
        self._give_up_unfinished()
        return self._words(spec)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors, by name."""
        assert self.held is not None, "nothing is held yet"
        return {spec.name: as_tensor(self.tensor_words(spec).copy(), spec) for spec in self.held.tensors}

    def advance(
        self,
        source: ChunkSource,
        keys: Keys,
        chain: Sequence[WeightManifest],
        patience: Patience | None = None,
    ) -> None:
        """Advance to the last version of `chain` (see plan.plan_chain).

        Raises TimeoutError when `patience` ends, FetchCancelled or RedisUnavailable: `held` is what it was,
        and an attempt with the same chain, or one that continues it, goes on where this one stopped; anything
        else that is done with the copy gives up what was fetched. Raises WeightsCorrupt when the version
        cannot be read; the copy then holds what it held before.
        """
        if self._unfinished is None or not self._unfinished.leads_to(chain):
            self._begin(chain)
        assert self._unfinished is not None
        self._unfinished.chain = chain
        try:
            self._go_on(self._unfinished, source, keys, patience)
        except (TimeoutError, FetchCancelled, RedisUnavailable):
            raise
        except BaseException:
            self.undo()
            raise

    def _begin(self, chain: Sequence[WeightManifest]) -> None:
        self._give_up_unfinished()
        self.keep()
        self._before = self.held
        self._journal = tempfile.SpooledTemporaryFile(max_size=JOURNAL_BYTES)  # noqa: SIM115 (kept open)
        self._unfinished = Unfinished(chain, self.held)

    def _go_on(self, work: Unfinished, source: ChunkSource, keys: Keys, patience: Patience | None) -> None:
        while work.index < len(work.chain):
            manifest = work.chain[work.index]
            if work.stream is None:
                work.stream = ByteStream(keys, manifest)
            work.stream.resume(source, patience)
            if not work.entered:
                self._enter(manifest, work)
            while work.tensor < len(manifest.tensors):
                self._take_tensor(manifest, manifest.tensors[work.tensor], work, work.stream)
            work.stream.end()
            work.next_version(manifest)
        self._unfinished = None
        self.held = work.reached

    def _give_up_unfinished(self) -> None:
        if self._unfinished is not None:
            self.undo()

    def undo(self) -> None:
        """Restore the version before the last `advance`; if its digest does not match, the copy is empty."""
        self._unfinished = None
        if self._aside is not None or (self._before is None and self._buffer is not None):
            self._drop(self._buffer)
            self._buffer, self._aside = self._aside, None
        elif self._journal is not None and self._before is not None:
            self._replay(self._journal)
            if any(self._digest(spec) != spec.digest for spec in self._before.tensors):
                self._drop(self._buffer)
                self._buffer = self._before = None
        self.held = self._before
        self.keep()

    def keep(self) -> None:
        """Keep the current version: discard what `undo` needs."""
        self._give_up_unfinished()
        self._drop(self._aside)
        self._aside = None
        self._before = self.held
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def close(self) -> None:
        """Release the memory."""
        self._give_up_unfinished()
        self.held = None
        self.keep()
        self._drop(self._buffer)
        self._buffer = None

    def __enter__(self) -> HostCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------

    def _words(self, spec: TensorSpec) -> Words:
        item = ITEM_BYTES[spec.dtype]
        return self._buffer_words(spec.offset, spec.nbytes // item, item)

    def _enter(self, manifest: WeightManifest, work: Unfinished) -> None:
        """Check that the version can follow what was reached, and make room for it."""
        reached, base = work.reached, manifest.base
        if base is None:
            work.fresh = reached is None or not reached.same_layout(manifest)
            if work.fresh:
                self._aside, self._buffer = self._buffer, _Buffer(manifest.nbytes)
        elif reached is None or reached.digest != base.digest:
            held = "nothing" if reached is None else f"version {reached.version}, {reached.digest}"
            raise WeightsCorrupt(
                f"a delta against {base}, but the copy holds {held}", version=manifest.version
            )
        elif not reached.same_layout(manifest):
            raise WeightsCorrupt(
                "the tensors of the delta are not those of its base", version=manifest.version
            )
        work.entered = True

    def _take_tensor(
        self, manifest: WeightManifest, spec: TensorSpec, work: Unfinished, stream: ByteStream
    ) -> None:
        target = self._words(spec)
        for piece in islice(pieces(target.size), work.piece, None):
            if manifest.base is not None:
                self._flip(spec, piece, _read_changes(manifest, spec, stream, target[piece]))
            else:
                item = ITEM_BYTES[spec.dtype]
                new = words(stream.read((piece.stop - piece.start) * item), item)
                if work.fresh:
                    target[piece] = new
                else:
                    self._flip(spec, piece, changes(target[piece], new))
            stream.mark()
            work.piece += 1
        self._check(manifest, spec)
        work.tensor, work.piece = work.tensor + 1, 0

    def _flip(self, spec: TensorSpec, piece: slice, found: Changes) -> None:
        """Apply changes, after writing them to the journal."""
        assert self._journal is not None
        if not found.at.size:
            return
        item = ITEM_BYTES[spec.dtype]
        place = (spec.offset + piece.start * item, piece.stop - piece.start, item)
        noted = self._journal.tell()
        try:
            for part in (_PLACE.pack(*place, found.at.size), found.at.data, found.bits.data):
                self._journal.write(part)
        except BaseException:
            self._journal.seek(noted)
            self._journal.truncate()
            raise
        found.flip(self._buffer_words(*place))

    def _replay(self, journal: IO[bytes]) -> None:
        """Flip all bits back; the order does not matter."""
        journal.seek(0)
        while place := journal.read(_PLACE.size):
            offset, count, item, flipped = _PLACE.unpack(place)
            at = np.frombuffer(journal.read(4 * flipped), dtype=np.uint32)
            found = Changes(at, words(journal.read(item * flipped), item))
            found.flip(self._buffer_words(offset, count, item))

    def _buffer_words(self, offset: int, count: int, item_bytes: int) -> Words:
        assert self._buffer is not None, "nothing is held yet"
        return words(self._buffer.bytes[offset : offset + count * item_bytes], item_bytes)

    def _check(self, manifest: WeightManifest, spec: TensorSpec) -> None:
        if self._digest(spec) != spec.digest:
            raise WeightsCorrupt("digest mismatch", version=manifest.version, tensor=spec.name)

    def _digest(self, spec: TensorSpec) -> str:
        return xxhash.xxh3_128_hexdigest(self._words(spec).data)

    @staticmethod
    def _drop(buffer: _Buffer | None) -> None:
        if buffer is not None:
            buffer.close()


def _read_changes(manifest: WeightManifest, spec: TensorSpec, stream: ByteStream, old: Words) -> Changes:
    try:
        return decode_piece(read_record(stream.read, old), old)
    except RecordError as exc:
        raise WeightsCorrupt(str(exc), version=manifest.version, tensor=spec.name) from exc


def as_tensor(values: Words, spec: TensorSpec) -> torch.Tensor:
    """The tensor that `spec` describes, sharing the memory of `values`."""
    import torch

    flat = torch.from_numpy(values.view(np.uint8)) if values.size else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, spec.dtype)).reshape(spec.shape)
