"""The weight broadcast through a real server: what is published is what is read, or an error says where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leeway.weights import (
    WeightManifest,
    WeightsCorrupt,
    WeightsNotFinite,
    WeightsVersionRefused,
    free_versions,
    latest_manifest,
    publish_weights,
    read_weights,
    verify_weights,
)

CHUNK = 300
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]


def example_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (7, 33), "a.bias": (33,), "b.weight": (5, 5, 5), "scale": (), "none": (0, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def publish(client, keys, version=1, epoch=0, tensors=None, **kwargs) -> WeightManifest:
    tensors = example_tensors() if tensors is None else tensors
    options = {"chunk_bytes": CHUNK, "step": 3, **kwargs}
    return publish_weights(client, keys, epoch=epoch, version=version, tensors=tensors.items(), **options)


@st.composite
def tensor_sets(draw):
    names = draw(st.lists(st.text("abc.", min_size=1, max_size=6), min_size=1, max_size=6, unique=True))
    result = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        values = torch.randint(-100, 100, shape, generator=generator)
        result[name] = values.to(dtype)
    return result


@given(tensors=tensor_sets(), chunk_bytes=st.integers(1, 600), wire=st.sampled_from(["bfloat16", "float32"]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_read_is_what_was_published(client, keys, tensors, chunk_bytes, wire):
    client.flushdb()
    manifest = publish(client, keys, tensors=tensors, chunk_bytes=chunk_bytes, wire_dtype=wire)
    assert latest_manifest(client, keys) == manifest
    assert verify_weights(client, keys, manifest) == manifest.digest
    got = dict(read_weights(client, keys, manifest))
    assert list(got) == list(tensors)
    for name, tensor in tensors.items():
        expected = tensor.to(getattr(torch, wire)) if tensor.is_floating_point() else tensor
        assert got[name].dtype == expected.dtype
        assert torch.equal(got[name], expected)
    entries = client.xrange(keys.weight_chunks(1))
    assert all(len(fields[b"data"]) <= chunk_bytes for _, fields in entries)


def test_digest_does_not_depend_on_the_cut_but_on_every_bit(client, keys):
    first = publish(client, keys, version=1)
    second = publish(client, keys, version=2, chunk_bytes=1000)
    assert first.digest == second.digest
    tensors = example_tensors()
    tensors["b.weight"][4, 4, 4] += 0.5
    assert publish(client, keys, version=3, tensors=tensors).digest != first.digest


def rewrite(client, keys, change) -> None:
    """Apply `change` to the list of chunk fields of version 1 and write the stream again."""
    stream = keys.weight_chunks(1)
    chunks = [fields for _, fields in client.xrange(stream)]
    client.delete(stream)
    for fields in change(chunks):
        client.xadd(stream, fields)


def flip(chunks):
    data = bytearray(chunks[2][b"data"])
    data[17] ^= 1
    chunks[2][b"data"] = bytes(data)
    return chunks


def forge(chunks):
    """Altered data under a matching chunk digest: only the tensor's digest can tell."""
    import xxhash

    chunks = flip(chunks)
    chunks[2][b"digest"] = xxhash.xxh3_128_hexdigest(chunks[2][b"data"]).encode()
    return chunks


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (flip, {"chunk": 2, "tensor": None}),
        (forge, {"chunk": None, "tensor": "b.weight"}),
        (lambda chunks: chunks[:1] + chunks[2:], {"chunk": 1, "tensor": None}),
        (lambda chunks: chunks[:-1], {"chunk": 2, "tensor": None}),
        (lambda chunks: [], {"chunk": 0, "tensor": None}),
        (lambda chunks: [*chunks[:2], chunks[1], *chunks[2:]], {"chunk": 2, "tensor": None}),
        (lambda chunks: [*chunks, chunks[-1]], {"chunk": 3, "tensor": None}),
        (lambda chunks: [chunks[1], chunks[0], *chunks[2:]], {"chunk": 0, "tensor": None}),
        (lambda chunks: [{**c, b"data": c[b"data"][:-1]} for c in chunks], {"chunk": 0, "tensor": None}),
        (lambda chunks: [{b"index": c[b"index"]} for c in chunks], {"chunk": 0, "tensor": None}),
    ],
    ids=["flip", "forge", "missing", "short", "gone", "repeated", "extra", "swapped", "cut", "empty"],
)
def test_a_damaged_broadcast_is_refused_and_says_where(client, keys, change, where):
    manifest = publish(client, keys)
    assert manifest.chunks == 3
    rewrite(client, keys, change)
    for read in (
        lambda: verify_weights(client, keys, manifest),
        lambda: [*read_weights(client, keys, manifest)],
    ):
        with pytest.raises(WeightsCorrupt) as caught:
            read()
        assert caught.value.version == 1
        assert {"chunk": caught.value.chunk, "tensor": caught.value.tensor} == where
    publish(client, keys, version=2)
    assert verify_weights(client, keys, latest_manifest(client, keys))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_weights_that_are_not_finite_on_the_wire_are_not_published(client, keys, value):
    tensors = example_tensors()
    tensors["b.weight"][1, 2, 3] = value
    with pytest.raises(WeightsNotFinite, match=r"version 1: tensor b\.weight has 1 of 125") as caught:
        publish(client, keys, tensors=tensors, wire_dtype=torch.float16)
    assert caught.value.tensor == "b.weight"
    assert client.keys() == []


def test_a_publisher_that_died_leaves_nothing_that_is_read(client, keys):
    client.xadd(keys.weight_chunks(1), {"index": 0, "data": b"of an attempt that died"})
    assert latest_manifest(client, keys) is None
    manifest = publish(client, keys)
    assert verify_weights(client, keys, manifest) == manifest.digest


def test_versions_only_rise_within_an_epoch(client, keys):
    publish(client, keys, version=5)
    for version, epoch in ((5, 0), (4, 0)):
        with pytest.raises(WeightsVersionRefused, match="version 5 of epoch 0"):
            publish(client, keys, version=version, epoch=epoch)
    assert verify_weights(client, keys, latest_manifest(client, keys))
    publish(client, keys, version=4, epoch=1)
    assert latest_manifest(client, keys).version == 4


def test_free_versions_keeps_what_is_current(client, keys):
    for version in range(1, 5):
        publish(client, keys, version=version)
    client.xadd(keys.weight_chunks(0), {"index": 0})  # left by a publisher that was killed
    assert free_versions(client, keys, below=4) == 4
    assert client.exists(*(keys.weight_chunks(v) for v in range(4))) == 0
    assert client.xlen(keys.weights) == 1
    assert verify_weights(client, keys, latest_manifest(client, keys))


def test_a_manifest_that_does_not_add_up_is_refused(client, keys):
    manifest = publish(client, keys)
    broken = manifest.model_dump_json().replace(manifest.tensors[0].digest, "0" * 32)
    client.xadd(keys.weights, {"manifest": broken})
    with pytest.raises(WeightsCorrupt, match="digest is not that of the tensors"):
        latest_manifest(client, keys)
    client.xadd(keys.weights, {"other": "x"})
    with pytest.raises(WeightsCorrupt, match="without a manifest"):
        latest_manifest(client, keys)
