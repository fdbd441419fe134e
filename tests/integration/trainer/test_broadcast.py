"""What samplers hold after every broadcast is theta, bit for bit, whatever the types and the ZeRO stage."""

from __future__ import annotations

import copy

import pytest
import torch
from trainer_support import make_batch, micro_batches, run_config

from leeway.messages import SamplerStatus
from leeway.streams import KEYFRAME_FIELD, now
from leeway.weights import ChunkSource, HostCopy, WeightsTooLarge, published_manifests
from leeway_trainer.broadcast import Broadcaster
from leeway_trainer.model import load_policy_model
from leeway_trainer.policy import Policy
from leeway_trainer.snapshot import Snapshot, wire_tensors
from leeway_trainer.transports import find_transport
from leeway_trainer.transports.base import Link


class Rig:
    """A policy, its snapshot, and a reader that follows what is published."""

    def __init__(self, tiny_dir, ranks, client, keys, *, wire="bfloat16", every=32, **trainer) -> None:
        options = {"learning_rate": 1e-6, "dtype": "bfloat16", "device": "cpu", **trainer}
        weights = {"dtype": wire, "keyframe_every": every}
        self.config = run_config(tiny_dir, trainer=options, weights=weights)
        dtype = getattr(torch, options["dtype"])
        model = load_policy_model(tiny_dir, dtype=dtype, chunk_tokens=5)
        self.snapshot = Snapshot(copy.deepcopy(model), self.config.trainer, ranks)
        self.policy = Policy(model, self.config.trainer, ranks)
        link = Link(self.config, ranks, client, keys, epoch=0)
        self.digest = link.identity.digest
        transport = find_transport(self.config, ranks)
        self.broadcaster = Broadcaster(transport, link, self.policy, self.snapshot)
        self.client, self.keys, self.wire = client, keys, getattr(torch, wire)
        self.copy, self.version = HostCopy(), -1

    def train(self) -> None:
        batch = micro_batches(make_batch(), budget=10_000)[0]
        logp = self.policy.forward(batch, last=True)[0]
        self.policy.backward(-logp.sum() / 50)
        self.policy.step(self.version + 1)

    def publish(self):
        manifest = self.broadcaster.publish(self.version + 1, step=0)
        self.broadcaster.refresh(step=0)
        self.version += 1
        assert manifest == self.broadcaster.last
        self.copy.advance(ChunkSource(self.client), self.keys, [manifest])
        return manifest

    def check(self) -> None:
        held = self.copy.tensors()
        for name, tensor in wire_tensors(self.policy, self.wire, step=0):
            assert torch.equal(held[name], tensor), name


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("dtype", "wire"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")]
)
def test_deltas_lead_to_theta(tiny_dir, ranks, client, keys, stage, dtype, wire):
    rig = Rig(tiny_dir, ranks, client, keys, wire=wire, every=3, zero_stage=stage, dtype=dtype)
    codecs = []
    for _ in range(5):
        codecs.append(rig.publish().codec)
        rig.check()
        rig.train()
    assert codecs == ["full", "delta", "delta", "full", "delta"]
    assert rig.broadcaster.last.wire_nbytes < rig.broadcaster.last.nbytes / (1 if wire == "float32" else 5)


def test_a_delta_that_is_no_smaller_is_sent_in_full(tiny_dir, ranks, client, keys):
    rig = Rig(tiny_dir, ranks, client, keys)
    rig.publish()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, param in rig.policy.named_parameters():
            noise = torch.randint(1, 120, param.shape, generator=generator, dtype=torch.int16)
            param.copy_((noise * 257).view(torch.bfloat16))
    manifest = rig.publish()
    assert (manifest.codec, manifest.wire_nbytes) == ("full", manifest.nbytes)
    rig.check()


def test_keyframes_on_demand(tiny_dir, ranks, client, keys):
    rig = Rig(tiny_dir, ranks, client, keys)
    rig.publish()
    assert rig.publish().codec == "delta"
    client.hset(keys.state, KEYFRAME_FIELD, "1")
    assert [rig.publish().codec for _ in range(2)] == ["full", "delta"]
    assert not rig.broadcaster.keyframe_wanted()
    status = SamplerStatus(sampler="s0", heartbeat=now(), config=rig.digest, stuck=rig.broadcaster.last.key)
    client.hset(keys.samplers, "s0", status.model_dump_json())
    assert rig.broadcaster.keyframe_wanted()
    assert rig.publish().codec == "full"
    assert not rig.broadcaster.keyframe_wanted()


def test_versions_are_kept_until_live_samplers_have_moved_on(tiny_dir, ranks, client, keys):
    rig = Rig(tiny_dir, ranks, client, keys, every=2)

    def held(name: str, version: int, ago: float = 0.0) -> None:
        status = SamplerStatus(
            sampler=name, heartbeat=now() - ago, config=rig.digest, epoch=0, version=version
        )
        client.hset(keys.samplers, name, status.model_dump_json())

    def published() -> list[int]:
        rig.publish()
        return [m.version for m in published_manifests(client, keys)]

    held("slow", 1)
    for expected in ([0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]):
        assert published() == expected
    held("slow", 3)
    assert published() == [2, 3, 4, 5]
    held("slow", 3, ago=60)  # dead
    held("joins", -1)
    assert published() == [4, 5, 6]


@pytest.mark.parametrize("every", [1, 32], ids=["full", "delta"])
def test_no_room_leaves_everything_as_it_is(tiny_dir, ranks, client, keys, every):
    rig = Rig(tiny_dir, ranks, client, keys, every=every)
    rig.publish()
    rig.train()
    before = {name: p.clone() for name, p in rig.snapshot.runner.named_parameters()}
    limit = client.config_get("maxmemory")["maxmemory"]
    try:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] * 1.1))
        with pytest.raises(WeightsTooLarge, match="do not fit the memory that Redis has left"):
            rig.broadcaster.publish(1, step=0)
    finally:
        client.config_set("maxmemory", limit)
    assert [m.version for m in published_manifests(client, keys)] == [0]
    assert not client.exists(keys.weight_chunks(0, 1))
    assert all(torch.equal(before[name], p) for name, p in rig.snapshot.runner.named_parameters())
    rig.publish()
    rig.check()
