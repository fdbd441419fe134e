"""The delta of a tensor is lossless for every bit pattern, and refuses what it cannot mean."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.weights.codec import (
    HEADER,
    PIECE_WORDS,
    RecordError,
    changes,
    count_not_finite,
    decode_piece,
    encode_piece,
    pieces,
    read_record,
)

SPECIAL = {
    2: [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC1, 0x7F81, 0xFFFF, 0x7C00, 0x7E01],
    4: [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF],
}
"""Zeros of both signs, denormals, infinities and NaN payloads of bfloat16, float16 and float32."""


@st.composite
def versions(draw):
    """Two versions of a piece: any words, any share of them changed."""
    item = draw(st.sampled_from([1, 2, 4, 8]))
    size = draw(st.one_of(st.integers(0, 40), st.integers(0, 5000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = rng.integers(0, 256, size * item, dtype=np.uint8).view(f"<u{item}")
    for words in [SPECIAL.get(item, [])]:
        if words and size:
            at = rng.integers(0, size, min(size, 20))
            old[at] = rng.choice(np.array(words, dtype=old.dtype), at.size)
    new = old.copy()
    share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]))
    at = np.flatnonzero(rng.random(size) < share)
    new[at] = rng.integers(0, 256, at.size * item, dtype=np.uint8).view(old.dtype)
    if item in SPECIAL and at.size:
        some = at[rng.random(at.size) < 0.5]
        new[some] = rng.choice(np.array(SPECIAL[item], dtype=old.dtype), some.size)
    return old, new


@given(versions())
@settings(max_examples=300, deadline=None)
def test_a_record_turns_old_into_new_and_back(pair):
    old, new = pair
    found = decode_piece(encode_piece(old, new), old)
    piece = old.copy()
    for expected in (new, old):
        found.flip(piece)
        assert piece.tobytes() == expected.tobytes()
    at, bits = changes(old, new)
    assert found.at.tobytes() == at.tobytes()
    assert found.bits.tobytes() == bits.tobytes()


@pytest.mark.parametrize("gaps", [[0, 254, 255, 256, 511], [70_000, 0, 255, 1 << 17], [PIECE_WORDS - 1]])
def test_gaps_at_the_edges_of_a_byte(gaps):
    at = np.cumsum(np.array(gaps) + 1) - 1
    old = np.zeros(PIECE_WORDS, dtype="<u2")
    new = old.copy()
    new[at] = 7
    piece = old.copy()
    apply_piece(encode_piece(old, new), piece)
    np.testing.assert_array_equal(piece, new)


def test_ten_million_words_in_pieces():
    rng = np.random.default_rng(3)
    old = rng.integers(0, 1 << 16, 10_000_000, dtype=np.uint16)
    new = old.copy()
    new[rng.integers(0, old.size, 40_000)] ^= 1
    stream = io.BytesIO(b"".join(encode_piece(old[p], new[p]) for p in pieces(old.size)))
    assert len(stream.getvalue()) < 40_000 * 2.6
    got = old.copy()
    for piece in pieces(got.size):
        apply_piece(read_record(stream.read, got[piece]), got[piece])
    assert stream.read() == b""
    np.testing.assert_array_equal(got, new)


def apply_piece(record: bytes, piece: np.ndarray) -> None:
    decode_piece(record, piece).flip(piece)


def example() -> tuple[np.ndarray, np.ndarray, bytes]:
    old = np.arange(1000, dtype="<u2")
    new = old.copy()
    new[[3, 4, 400, 999]] ^= 5
    return old, new, encode_piece(old, new)


def repacked(count: int, wide: int, gaps: bytes, bits: bytes) -> bytes:
    first, second = (zstandard.ZstdCompressor().compress(raw) for raw in (gaps, bits))
    return HEADER.pack(count, wide, len(first), len(second)) + first + second


@pytest.mark.parametrize(
    "record",
    [
        repacked(1001, 0, bytes(1001), bytes(2002)),
        repacked(1, 2, bytes(9), bytes(2)),
        repacked(2, 0, bytes(3), bytes(4)),
        repacked(2, 0, bytes(2), bytes(5)),
        repacked(2, 1, bytes([1, 2]) + bytes(4), bytes(4)),
        repacked(2, 1, bytes([1, 255]) + struct.pack("<I", 1000), bytes(4)),
        repacked(0, 0, b"", b""),
        HEADER.pack(2, 0, 9, 0) + b"not zstd.",
        HEADER.pack(2, 0, 99, 1) + b"short",
    ],
    ids=["many", "more-wide", "gaps", "bits", "no-wide", "beyond", "empty-frame", "garbage", "cut"],
)
def test_what_is_not_a_record_of_the_piece_is_rejected_and_changes_nothing(record):
    old, _, _ = example()
    piece = old.copy()
    with pytest.raises(RecordError):
        apply_piece(record, piece)
    np.testing.assert_array_equal(piece, old)


def test_a_record_longer_than_any_can_be_is_rejected_before_it_is_read():
    stream = io.BytesIO(HEADER.pack(1000, 0, 1 << 31, 1 << 31))
    with pytest.raises(RecordError, match="does not fit"):
        read_record(stream.read, example()[0])


@pytest.mark.parametrize("item", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 100, PIECE_WORDS])
def test_a_record_of_noise_is_short_enough_to_be_read(item, size):
    rng = np.random.default_rng(item)
    old, new = np.frombuffer(rng.bytes(2 * size * item), dtype=f"<u{item}").reshape(2, size)
    piece = old.copy()
    apply_piece(read_record(io.BytesIO(encode_piece(old, new)).read, piece), piece)
    np.testing.assert_array_equal(piece, new)


def test_a_flipped_bit_never_writes_outside_the_piece():
    old, new, record = example()
    for bit in range(len(record) * 8):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        piece = old.copy()
        try:
            apply_piece(bytes(damaged), piece)
        except RecordError:
            np.testing.assert_array_equal(piece, old)
    piece = old.copy()
    apply_piece(record, piece)
    np.testing.assert_array_equal(piece, new)


@given(st.sampled_from(["float64", "float32", "float16", "bfloat16"]), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_not_finite_is_what_torch_says(dtype, seed):
    import torch

    rng = np.random.default_rng(seed)
    tensor = torch.from_numpy(rng.integers(0, 256, 8 * 500, dtype=np.uint8)).view(getattr(torch, dtype))
    words = tensor.view(torch.uint8).numpy().view(f"<u{tensor.element_size()}")
    assert count_not_finite(words, dtype) == int((~torch.isfinite(tensor)).sum())
