"""The weight broadcast through a real server: what is published is what is read, or an error says where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights_support import CHUNK, Publisher, assert_holds, example_tensors, flip, follow, nudged, rewrite

from leeway.weights import (
    HostCopy,
    WeightsCorrupt,
    WeightsError,
    WeightsNotFinite,
    WeightsTooLarge,
    WeightsVersionRefused,
    free_versions,
    latest_manifest,
    plan_free,
    publish_offer,
    published_manifests,
)
from leeway.weights.tensors import tensor_specs

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
ANYTHING = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def tensor_sets(draw):
    """Two versions of the same names, shapes and dtypes; some tensors are not contiguous."""
    names = draw(st.lists(st.text("abc.", min_size=1, max_size=6), min_size=1, max_size=6, unique=True))
    old, new = {}, {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        values = torch.randint(-100, 100, shape, generator=generator)
        hit = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.1, 1.0]))
        change = torch.randint(-100, 100, shape, generator=generator)
        old[name], new[name] = values.to(dtype), torch.where(hit, change, values).to(dtype)
        if draw(st.booleans()):
            order = [*range(len(shape))][::-1]
            old[name], new[name] = old[name].permute(order), new[name].permute(order)
    return old, new


@given(
    pair=tensor_sets(),
    chunk_bytes=st.integers(1, 600),
    wire=st.sampled_from(["bfloat16", "float16", "float32"]),
)
@ANYTHING
def test_what_is_read_is_what_was_published(client, keys, pair, chunk_bytes, wire):
    client.flushdb()
    publisher = Publisher(client, keys, wire=wire, chunk_bytes=chunk_bytes)
    with HostCopy() as copy:
        for tensors in pair:
            manifest = publisher.send(tensors)
            assert latest_manifest(client, keys) == manifest
            entries = client.xrange(keys.weight_chunks(publisher.epoch, publisher.version))
            assert all(len(fields[b"data"]) <= chunk_bytes for _, fields in entries)
            follow(client, keys, copy)
            assert_holds(copy, manifest, tensors, wire)


def test_a_delta_is_small_and_equal_weights_have_equal_digests(client, keys):
    publisher = Publisher(client, keys)
    first = publisher.send()
    assert (first.codec, first.wire_nbytes) == ("full", first.nbytes)
    same = publisher.send(publisher.tensors)
    assert (same.codec, same.base.version, same.digest) == ("delta", 1, first.digest)
    assert same.wire_nbytes < 100
    assert publisher.send(publisher.tensors, full=True, chunk_bytes=1000).digest == first.digest
    changed = {**publisher.tensors, "b.weight": publisher.tensors["b.weight"].clone()}
    changed["b.weight"][4, 4, 4] += 0.5
    assert publisher.send(changed).digest != first.digest


def test_a_delta_of_other_tensors_is_rejected(client, keys):
    publisher = Publisher(client, keys)
    publisher.send()
    other = {name: tensor for name, tensor in publisher.tensors.items() if name != "scale"}
    with pytest.raises(WeightsError, match="other tensors than those of version 1"):
        publisher.send(other)
    assert latest_manifest(client, keys).version == 1


@pytest.mark.parametrize("full", [True, False], ids=["full", "delta"])
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda c: flip(c, 1), 1),
        (lambda c: c[:1] + c[2:], None),  # a wrong number of chunks is noticed before any is read
        (lambda c: c[:-1], None),
        (lambda c: [], None),
        (lambda c: [*c[:2], c[1], *c[2:]], None),
        (lambda c: [*c, c[-1]], None),
        (lambda c: [c[1], c[0], *c[2:]], 0),
        (lambda c: [{**x, b"data": x[b"data"][:-1]} for x in c], 0),
        (lambda c: [{b"index": x[b"index"]} for x in c], 0),
    ],
    ids=["flip", "missing", "short", "gone", "repeated", "extra", "swapped", "cut", "empty"],
)
def test_a_damaged_broadcast_is_rejected_and_says_where(client, keys, change, where, full):
    publisher = Publisher(client, keys, chunk_bytes=100)
    first = publisher.send()
    before = publisher.tensors
    with HostCopy() as copy:
        follow(client, keys, copy)
        manifest = publisher.send(full=full)
        assert manifest.chunks >= 3
        rewrite(client, keys, 2, change)
        with pytest.raises(WeightsCorrupt) as caught:
            follow(client, keys, copy)
        assert caught.value.version == 2
        assert (caught.value.chunk, caught.value.tensor) == (where, None)
        assert ("according to the manifest" in str(caught.value)) == (where is None)
        assert_holds(copy, first, before)
        publisher.send(full=True)
        follow(client, keys, copy)
        assert_holds(copy, *publisher.sent[-1])


@pytest.mark.parametrize("full", [True, False], ids=["full", "delta"])
def test_a_forged_chunk_is_found_by_the_result(client, keys, full):
    publisher = Publisher(client, keys, chunk_bytes=100)
    publisher.send()
    with HostCopy() as copy:
        follow(client, keys, copy)
        manifest = publisher.send(full=full)
        intact = client.dump(keys.weight_chunks(0, 2))
        for index in range(manifest.chunks):
            rewrite(client, keys, 2, lambda c, i=index: flip(c, i, forge=True))
            with pytest.raises(WeightsCorrupt):
                follow(client, keys, copy)
            assert_holds(copy, *publisher.sent[0])
            client.restore(keys.weight_chunks(0, 2), 0, intact, replace=True)
        follow(client, keys, copy)
        assert_holds(copy, *publisher.sent[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_weights_that_are_not_finite_on_the_wire_are_not_published(client, keys, value):
    publisher = Publisher(client, keys, wire="float16")
    tensors = example_tensors()
    tensors["b.weight"][1, 2, 3] = value
    with pytest.raises(WeightsNotFinite, match=r"version 1: tensor b\.weight has 1 of 125") as caught:
        publisher.send(tensors)
    assert caught.value.tensor == "b.weight"
    assert client.keys() == []


def test_more_than_fits_is_not_published(client, keys):
    publisher = Publisher(client, keys)
    publisher.send()
    for full in (True, False):
        with pytest.raises(WeightsTooLarge, match=r"version \d: .* bytes exceed the limit of 200"):
            publisher.send(full=full, limit_bytes=200)
        assert client.exists(keys.weight_chunks(publisher.epoch, publisher.version)) == 0
    assert latest_manifest(client, keys).version == 1
    assert publisher.send(limit_bytes=5000)


def test_a_publisher_that_died_leaves_nothing_that_is_read(client, keys):
    client.xadd(keys.weight_chunks(0, 1), {"index": 0, "data": b"of an attempt that died"})
    assert latest_manifest(client, keys) is None
    publisher = Publisher(client, keys)
    publisher.send()
    with HostCopy() as copy:
        follow(client, keys, copy)
        assert_holds(copy, *publisher.sent[-1])


def test_versions_only_rise_within_an_epoch(client, keys):
    publisher = Publisher(client, keys, version=4)
    publisher.send()
    for version in (4, 3):
        publisher.version = version
        with pytest.raises(WeightsVersionRefused, match="version 5 of epoch 0"):
            publisher.send()
    publisher.version, publisher.epoch = 3, 1
    publisher.send(full=True)
    assert latest_manifest(client, keys).key == (1, 4)


def test_what_is_freed_is_gone_and_a_joiner_finds_the_rest(client, keys):
    publisher = Publisher(client, keys)
    for full in (True, False, False, True, False):
        publisher.send(full=full)
    client.xadd(keys.weight_chunks(0, 0), {"index": 0})  # left by a publisher that was killed
    client.sadd(keys.weight_streams, keys.weight_chunks(0, 0))
    published = published_manifests(client, keys)
    assert free_versions(client, keys, plan_free(published, [(0, 5)]), epoch=0) == 4
    assert client.exists(*(keys.weight_chunks(0, v) for v in range(4))) == 0
    assert [m.version for m in published_manifests(client, keys)] == [4, 5]
    with HostCopy() as copy:
        follow(client, keys, copy)
        assert_holds(copy, *publisher.sent[-1])


def test_a_number_that_a_resumed_run_uses_again_is_not_freed_with_the_old_one(client, keys):
    publisher = Publisher(client, keys)
    for _ in range(3):
        publisher.send()
    publisher.epoch, publisher.version = 1, 1
    publisher.send(full=True)
    free_versions(client, keys, plan_free(published_manifests(client, keys), []), epoch=1)
    assert [m.key for m in published_manifests(client, keys)] == [(1, 2)]
    assert client.exists(*(keys.weight_chunks(0, v) for v in (1, 2, 3))) == 0
    with HostCopy() as copy:
        follow(client, keys, copy)
        assert_holds(copy, *publisher.sent[-1])


def test_a_manifest_that_does_not_add_up_is_rejected(client, keys):
    manifest = Publisher(client, keys).send()
    broken = manifest.model_dump_json().replace(manifest.tensors[0].digest, "0" * 32)
    client.xadd(keys.weights, {"manifest": broken})
    with pytest.raises(WeightsCorrupt, match="digest does not match the listed tensors"):
        latest_manifest(client, keys)
    client.delete(keys.weights)
    client.xadd(keys.weights, {"other": "x"})
    with pytest.raises(WeightsCorrupt, match="an entry of stream weights has no manifest"):
        latest_manifest(client, keys)


def test_a_keyframe_of_another_layout_replaces_the_copy_and_can_be_undone(client, keys):
    publisher = Publisher(client, keys)
    publisher.send()
    with HostCopy() as copy:
        follow(client, keys, copy)
        publisher.send({"other": torch.ones(CHUNK)}, full=True)
        publisher.send(nudged(publisher.tensors, 3))
        follow(client, keys, copy)
        assert_holds(copy, *publisher.sent[2])
        copy.undo()
        assert_holds(copy, *publisher.sent[0])
        copy.undo()
        assert_holds(copy, *publisher.sent[0])


def test_a_version_of_another_transport_has_only_a_manifest_in_redis(client, keys):
    publisher = Publisher(client, keys)
    publisher.send()
    tensors = {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "scale": torch.tensor(2.0)}
    offer = {"path": "/weights/2", "parts": [1, 2]}
    sent = publish_offer(
        client,
        keys,
        transport="file",
        offer=offer,
        specs=tensor_specs(tensors.items()),
        epoch=0,
        version=2,
        step=5,
    )
    assert latest_manifest(client, keys) == sent
    assert (sent.transport, sent.offer, sent.nbytes, sent.wire_nbytes, sent.chunks) == (
        "file",
        offer,
        16,
        0,
        0,
    )
    assert [(spec.name, spec.offset) for spec in sent.tensors] == [("w", 0), ("scale", 12)]
    assert not client.exists(keys.weight_chunks(0, 2))
    with pytest.raises(WeightsVersionRefused, match="version 2 of run epoch 0 is not above version 2"):
        publish_offer(
            client, keys, transport="file", offer=offer, specs=sent.tensors, epoch=0, version=2, step=6
        )
    free_versions(client, keys, plan_free(published_manifests(client, keys), [(0, 2)]), epoch=0)
    assert published_manifests(client, keys) == [sent]
    assert not client.exists(keys.weight_chunks(0, 1))
