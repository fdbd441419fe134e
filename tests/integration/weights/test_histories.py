"""Long histories: samplers that come, fall behind and go never hold anything but a published version."""

from __future__ import annotations

import random

import pytest
import torch
from weights_support import Publisher, assert_holds, follow, nudged

from leeway.weights import (
    HostCopy,
    WeightManifest,
    decide_codec,
    free_versions,
    plan_free,
    published_manifests,
)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("wire", ["bfloat16", "float16", "float32"])
def test_fifty_versions_with_joins_losses_and_keyframes(client, keys, seed, wire):
    dice = random.Random(seed)
    tensors = {
        "embed": torch.randn(61, 40),
        "scale": torch.tensor(0.5),
        "none": torch.empty(0, 3),
        "steps": torch.arange(7),
    }
    publisher = Publisher(
        client, keys, tensors=tensors, wire=wire, chunk_bytes=dice.choice([97, 1000, 1 << 16])
    )
    samplers: dict[str, HostCopy] = {}
    codecs = []
    for number in range(50):
        published = published_manifests(client, keys)
        held = [copy.held.key for copy in samplers.values() if copy.held is not None]
        free_versions(client, keys, plan_free(published, held), epoch=publisher.epoch)
        if number and dice.random() < 0.05:  # the trainer starts again
            publisher.epoch += 1
        codec = decide_codec(
            publisher.epoch,
            published_manifests(client, keys),
            keyframe_every=dice.choice([4, 9]),
            demanded=dice.random() < 0.05,
        )
        codecs.append(codec)
        share = dice.choice([0.0, 0.01, 0.2, 1.0])
        publisher.send(nudged(publisher.tensors, number, share), full=codec == "full")
        if len(samplers) < 4 and dice.random() < 0.4:
            samplers[f"s{number}"] = HostCopy()
        if len(samplers) > 1 and dice.random() < 0.2:
            samplers.pop(dice.choice(sorted(samplers))).close()
        for name in sorted(samplers):
            if dice.random() < 0.3:
                continue  # busy: it falls behind
            follow(client, keys, samplers[name])
            assert_holds(samplers[name], *publisher.sent[-1], wire)
    samplers["last"] = HostCopy()
    for copy in samplers.values():
        follow(client, keys, copy)
        assert_holds(copy, *publisher.sent[-1], wire)
        copy.close()
    assert {"full", "delta"} == set(codecs)


def test_undo_goes_back_over_a_chain_of_keyframe_and_deltas(client, keys):
    publisher = Publisher(client, keys)
    publisher.send()
    with HostCopy() as copy:
        follow(client, keys, copy)
        for full in (False, False, True, False):
            publisher.send(full=full)
        follow(client, keys, copy)
        assert_holds(copy, *publisher.sent[4])
        copy.undo()
        assert_holds(copy, *publisher.sent[0])
        follow(client, keys, copy, wanted=_manifest(publisher, 3))
        copy.keep()
        copy.undo()
        assert_holds(copy, *publisher.sent[2])


def test_a_large_journal_goes_to_a_file(client, keys, monkeypatch):
    monkeypatch.setattr("leeway.weights.host_copy.JOURNAL_BYTES", 1000)
    publisher = Publisher(client, keys, tensors={"w": torch.randn(40_000)}, chunk_bytes=1 << 16)
    publisher.send()
    with HostCopy() as copy:
        follow(client, keys, copy)
        publisher.send()
        follow(client, keys, copy)
        copy.undo()
        assert_holds(copy, *publisher.sent[0])


def _manifest(publisher: Publisher, version: int) -> WeightManifest:
    return publisher.sent[version - 1][0]
