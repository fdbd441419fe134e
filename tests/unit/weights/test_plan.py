"""Decisions about versions: pure functions of what is published and who holds what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.weights import (
    WeightManifest,
    WeightsCorrupt,
    decide_codec,
    plan_chain,
    plan_free,
    room_for,
    weights_digest,
)
from leeway.weights.manifest import Base, TensorSpec


def manifest(version: int, base: int | None = None, epoch: int = 0, wire_nbytes: int = 8) -> WeightManifest:
    def spec(number: int) -> TensorSpec:
        return TensorSpec(
            name="w", dtype="float32", shape=(2,), offset=0, nbytes=8, digest=f"{epoch}.{number}"
        )

    return WeightManifest(
        run="r",
        epoch=epoch,
        version=version,
        step=0,
        codec="full" if base is None else "delta",
        base=None if base is None else Base(version=base, digest=weights_digest([spec(base)])),
        chunk_bytes=1 << 20,
        chunks=1,
        wire_nbytes=wire_nbytes,
        nbytes=8,
        tensors=(spec(version),),
        digest=weights_digest([spec(version)]),
    )


def history(text: str, epoch: int = 0, first: int = 1) -> list[WeightManifest]:
    """`KDDK`: versions from `first` on, keyframes and deltas."""
    return [manifest(v, None if kind == "K" else v - 1, epoch) for v, kind in enumerate(text, start=first)]


def test_full_or_delta():
    def codec(text: str, every: int = 4, demanded: bool = False, epoch: int = 0) -> str:
        return decide_codec(epoch, history(text), keyframe_every=every, demanded=demanded)

    assert codec("") == "full"
    assert codec("K") == "delta"
    assert codec("KDD") == "delta"
    assert codec("KDDD") == "full"
    assert codec("KDDDK") == "delta"
    assert codec("KD", demanded=True) == "full"
    assert codec("K", epoch=1) == "full"  # a new epoch does not build on the last one
    assert codec("K", every=1) == "full"


@given(st.integers(1, 9), st.integers(1, 60))
def test_a_keyframe_every_n_versions(every, count):
    versions: list[WeightManifest] = []
    for version in range(count):
        codec = decide_codec(0, versions, keyframe_every=every, demanded=False)
        versions.append(manifest(version, None if codec == "full" else version - 1))
    assert [m.version for m in versions if m.base is None] == list(range(0, count, every))


def test_the_chain_starts_at_what_is_held_or_at_a_keyframe():
    versions = history("KDDKDD")

    def chain(wanted: int, held: WeightManifest | None) -> list[int]:
        return [m.version for m in plan_chain(versions, (0, wanted), held)]

    assert chain(6, None) == [4, 5, 6]
    assert chain(6, versions[4]) == [6]
    assert chain(6, versions[3]) == [5, 6]
    assert chain(6, versions[1]) == [4, 5, 6]
    assert chain(3, None) == [1, 2, 3]
    forged = versions[4].model_copy(update={"digest": "other"})
    assert chain(6, forged) == [4, 5, 6]


def test_a_broken_chain_is_named():
    versions = history("KDDD")
    with pytest.raises(WeightsCorrupt, match=r"version 2: no longer published.*delta to version 3 needs it"):
        plan_chain([versions[0], *versions[2:]], (0, 4), None)
    with pytest.raises(WeightsCorrupt, match="version 9: no longer published"):
        plan_chain(versions, (0, 9), versions[3])


def test_free_what_all_have_left_behind_and_keep_what_a_joiner_needs():
    versions = history("KDDKDD")

    def freed(*held: int) -> list[int]:
        return [m.version for m in plan_free(versions, [(0, v) for v in held])]

    assert freed(6, 6) == [1, 2, 3]
    assert freed(6, 4) == [1, 2, 3]
    assert freed(6, 3) == []
    assert freed() == [1, 2, 3]
    assert plan_free([], []) == []
    assert plan_free(history("KDD"), [(0, 3)]) == []


def test_earlier_epochs_are_void():
    versions = [*history("KDD"), *history("KD", epoch=1, first=2)]
    assert [m.key for m in plan_free(versions, [(0, 3)])] == [(0, 1), (0, 2), (0, 3)]


def test_room():
    versions = [manifest(1), manifest(2, 1, wire_nbytes=3)]
    assert room_for(versions, limit_bytes=None, memory={"maxmemory": 0, "used_memory": 5}) is None
    assert room_for(versions, limit_bytes=100, memory={}) == 89
    assert room_for(versions, limit_bytes=None, memory={"maxmemory": 1000, "used_memory": 100}) == 800
    assert room_for(versions, limit_bytes=50, memory={"maxmemory": 1000, "used_memory": 100}) == 39
