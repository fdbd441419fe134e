"""Lossless delta between two versions of a tensor: which words changed, and by which bits.

A tensor is a flat array of little-endian words of its item size; nothing here knows about numbers, so NaN
payloads, -0.0 and denormals come out as they went in. It is cut into pieces of PIECE_WORDS words, and each
piece becomes one record:

    header   changed words, wide gaps, bytes of the frame      (three little-endian u32)
    frame    zstd of: gaps u8 [n] | wide gaps, 4 byte planes u8 [4, w] | changed bits, byte planes u8 [k, n]

A gap is the number of unchanged words before a changed one; 255 stands for the next wide gap. Changed bits
are old XOR new, so that applying a record twice gives the old piece back: a record is its own undo. Byte
planes (all lowest bytes, then all second bytes, ...) keep bytes of one kind together, which is what the
compressor can use. Memory: about 30 bytes per word of a piece where every word changed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

PIECE_WORDS = 1 << 20
WIDE = 255
LEVEL = 1
HEADER = struct.Struct("<III")

Words = NDArray[np.unsignedinteger[Any]]


class RecordError(ValueError):
    """Bytes that are no record of a piece of this size."""


class ReadExactly(Protocol):
    """Returns the next `count` bytes of a stream."""

    def __call__(self, count: int, /) -> bytes: ...


def words(data: Any, item_bytes: int) -> Words:
    """A buffer of bytes as flat little-endian words, without a copy."""
    return np.frombuffer(data, dtype=f"<u{item_bytes}")


def pieces(count: int) -> Iterator[slice]:
    """The pieces of a tensor of `count` words."""
    return (slice(at, min(at + PIECE_WORDS, count)) for at in range(0, count, PIECE_WORDS))


def encode_piece(old: Words, new: Words) -> bytes:
    """The record that turns `old` into `new`; both flat, of one size (at most PIECE_WORDS) and word size."""
    at = np.flatnonzero(old != new)
    if not at.size:
        return HEADER.pack(0, 0, 0)
    gaps = np.diff(at, prepend=-1) - 1
    wide = gaps[gaps >= WIDE].astype("<u4")
    changed = np.bitwise_xor(old[at], new[at])
    raw = np.minimum(gaps, WIDE).astype(np.uint8).tobytes() + _planes(wide) + _planes(changed)
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(raw)
    return HEADER.pack(at.size, wide.size, len(frame)) + frame


def read_record(read: ReadExactly) -> bytes:
    """The next record of a stream."""
    header = read(HEADER.size)
    frame_bytes = HEADER.unpack(header)[2]
    return header + read(frame_bytes) if frame_bytes else header


def apply_piece(record: bytes, piece: Words) -> None:
    """Flip in `piece` what `record` names. Raises RecordError, and then `piece` is as it was."""
    count, wide_count, frame_bytes = HEADER.unpack_from(record)
    if len(record) != HEADER.size + frame_bytes or count > piece.size or wide_count > count:
        raise RecordError(f"a record of {count} changes does not fit a piece of {piece.size} words")
    if not count:
        if frame_bytes:
            raise RecordError("a record of no changes has a frame")
        return
    item = piece.dtype.itemsize
    raw = _decompressed(record[HEADER.size :], count * (1 + item) + 4 * wide_count)
    gaps = raw[:count].astype(np.int64)
    is_wide = gaps == WIDE
    if np.count_nonzero(is_wide) != wide_count:
        raise RecordError(f"{np.count_nonzero(is_wide)} wide gaps, {wide_count} announced")
    gaps[is_wide] = _from_planes(raw[count : count + 4 * wide_count], 4)
    at = np.cumsum(gaps + 1) - 1
    if at[-1] >= piece.size:
        raise RecordError(f"a change at word {at[-1]} of a piece of {piece.size} words")
    piece[at] ^= _from_planes(raw[count + 4 * wide_count :], item)


def _planes(values: Words) -> bytes:
    return values.view(np.uint8).reshape(values.size, values.dtype.itemsize).T.tobytes()


def _from_planes(planes: NDArray[np.uint8], item_bytes: int) -> Words:
    rows = np.ascontiguousarray(planes.reshape(item_bytes, -1).T)
    return rows.view(f"<u{item_bytes}").reshape(-1)


def _decompressed(frame: bytes, size: int) -> NDArray[np.uint8]:
    try:
        if zstandard.frame_content_size(frame) != size:  # before anything of that size is allocated
            raise RecordError(f"a frame that does not hold {size} bytes")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), dtype=np.uint8)
    except zstandard.ZstdError as exc:
        raise RecordError(f"a damaged frame: {exc}") from exc


_EXPONENTS = {"float64": (8, 0x7FF << 52), "float32": (4, 0xFF << 23), "float16": (2, 0x1F << 10)}
_EXPONENTS["bfloat16"] = (2, 0xFF << 7)


def count_not_finite(values: Words, dtype: str) -> int:
    """Words that are NaN or infinity in floating-point type `dtype`; 0 for other types."""
    if dtype not in _EXPONENTS:
        return 0
    mask = values.dtype.type(_EXPONENTS[dtype][1])
    found = 0
    for piece in pieces(values.size):  # a piece fits the cache
        exponents = values[piece] & mask
        if exponents.max(initial=0) == mask:  # hardly ever: the maximum is much cheaper than the count
            found += int(np.count_nonzero(exponents == mask))
    return found
