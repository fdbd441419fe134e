"""A fault at every chunk: a reader holds the old version, whole, and the next attempt succeeds."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import redis
import torch
from weights_support import Publisher, assert_holds, flip, follow, rewrite

from leeway.streams import Keys, RedisUnavailable, connect
from leeway.weights import ChunkSource, HostCopy, Patience, WeightsCorrupt, plan_chain, published_manifests
from leeway.weights.manifest import Base, TensorSpec, weights_digest
from leeway_host.redis_server import EmbeddedRedis

FAULTS = {
    "cut": lambda c, i: [{**x, b"data": x[b"data"][:-1]} if n == i else x for n, x in enumerate(c)],
    "flipped": flip,
    "missing": lambda c, i: c[:i] + c[i + 1 :],
    "repeated": lambda c, i: [*c[: i + 1], c[i], *c[i + 1 :]],
    "out-of-order": lambda c, i: [*c[:i], *c[i : i + 2][::-1], *c[i + 2 :]] if i + 1 < len(c) else [*c[:i]],
}


@pytest.mark.parametrize("full", [True, False], ids=["full", "delta"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_every_chunk(client, keys, fault, full):
    publisher = Publisher(client, keys, chunk_bytes=100 if full else 40)
    publisher.send()
    with HostCopy() as copy:
        follow(client, keys, copy)
        manifest = publisher.send(full=full)
        assert manifest.chunks > 4
        intact = client.dump(keys.weight_chunks(0, 2))
        for index in range(manifest.chunks):
            rewrite(client, keys, 2, lambda c, i=index: FAULTS[fault](c, i))
            with pytest.raises(WeightsCorrupt, match="version 2"):
                follow(client, keys, copy)
            assert_holds(copy, *publisher.sent[0])
            client.restore(keys.weight_chunks(0, 2), 0, intact, replace=True)
        follow(client, keys, copy)
        assert_holds(copy, *publisher.sent[1])


def test_a_wrong_base_is_rejected_before_anything_changes(client, keys):
    publisher = Publisher(client, keys)
    publisher.send()
    with HostCopy() as copy:
        follow(client, keys, copy)
        delta = publisher.send()
        source = ChunkSource(client)
        other = delta.model_copy(update={"base": Base(version=1, digest="0" * 32)})
        with pytest.raises(WeightsCorrupt, match="a delta against .* but the copy holds version 1"):
            copy.advance(source, keys, [other])
        assert_holds(copy, *publisher.sent[0])
        with HostCopy() as empty, pytest.raises(WeightsCorrupt, match="but the copy holds nothing"):
            empty.advance(source, keys, [delta])
        follow(client, keys, copy)
        assert_holds(copy, *publisher.sent[1])


PROMISES: dict[str, dict[str, int]] = {
    "one long chunk": {"chunk_bytes": 1 << 40, "chunks": 1, "wire_nbytes": 1 << 40},
    "many chunks": {"chunk_bytes": 1 << 20, "chunks": 1 << 20, "wire_nbytes": 1 << 40},
    "longer chunks": {"chunk_bytes": 512 << 20, "chunks": 2, "wire_nbytes": 1 << 30},
}
"""What a manifest may say of a version that has two chunks of 300 bytes."""


@pytest.mark.parametrize("promise", PROMISES)
def test_a_manifest_that_promises_too_much_costs_no_memory(client, keys, promise):
    publisher = Publisher(client, keys)
    publisher.send({"w": torch.zeros(300)})
    (entry_id, fields), *_ = client.xrange(keys.weights)
    said = json.loads(fields[b"manifest"])
    said |= PROMISES[promise]
    said["nbytes"] = said["tensors"][0]["nbytes"] = said["wire_nbytes"]
    said["tensors"][0]["shape"] = [said["nbytes"] // 2]
    spec = TensorSpec.model_validate(said["tensors"][0])
    said["digest"] = weights_digest([spec])
    client.xdel(keys.weights, entry_id)
    client.xadd(keys.weights, {b"manifest": json.dumps(said)})
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    with HostCopy() as copy:
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
        try:
            with pytest.raises(WeightsCorrupt):
                follow(client, keys, copy)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert copy.held is None


class CutOff(ChunkSource):
    """Breaks off before chunk `at`."""

    def __init__(self, client: redis.Redis, at: int, error: Exception) -> None:
        super().__init__(client)
        self.at, self.error = at, error

    def read(self, stream: str, index: int, size: int, version: int) -> bytes:
        if index == self.at:
            raise self.error
        return super().read(stream, index, size, version)


@pytest.mark.parametrize("full", [True, False], ids=["full", "delta"])
def test_a_server_that_is_lost_at_any_chunk(client, keys, full):
    publisher = Publisher(client, keys, chunk_bytes=100)
    publisher.send()
    with HostCopy() as copy:
        follow(client, keys, copy)
        manifest = publisher.send(full=full)
        chain = plan_chain(published_manifests(client, keys), manifest.key, copy.held)
        for index in range(manifest.chunks):
            with pytest.raises(RedisUnavailable):
                copy.advance(CutOff(client, index, RedisUnavailable("gone")), keys, chain)
            assert_holds(copy, *publisher.sent[0])
        copy.advance(ChunkSource(client), keys, chain)
        assert_holds(copy, *publisher.sent[1])


def test_a_real_server_that_stops_and_goes_on_during_a_read(keys):
    with EmbeddedRedis() as server:
        client = connect(server.url, socket_timeout_s=1.0)
        publisher = Publisher(client, keys, tensors={"w": torch.randn(200_000)}, chunk_bytes=5_000)
        publisher.send()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        threading.Timer(2.5, os.kill, (server.pid, signal.SIGCONT)).start()
        with HostCopy() as copy:
            copy.advance(ChunkSource(client, budget_s=20.0), keys, [publisher.sent[0][0]])
            assert_holds(copy, *publisher.sent[0])
            os.kill(server.pid, signal.SIGSTOP)
            began = time.monotonic()
            try:
                with pytest.raises(RedisUnavailable, match="counting chunks"):
                    copy.advance(ChunkSource(client, budget_s=1.0), keys, [publisher.sent[0][0]])
            finally:
                os.kill(server.pid, signal.SIGCONT)
            assert time.monotonic() - began < 15
            assert_holds(copy, *publisher.sent[0])
        client.close()


def test_the_patience_ends_a_read(client, keys):
    publisher = Publisher(client, keys)
    publisher.send()
    with HostCopy() as copy:
        follow(client, keys, copy)
        manifest = publisher.send()
        with pytest.raises(TimeoutError, match="version 2, before chunk 0 of .: no progress for 0 s"):
            copy.advance(ChunkSource(client), keys, [manifest], Patience(0.0))
        assert_holds(copy, *publisher.sent[0])


READER = """
import sys, time
sys.path[:0] = {path!r}
from weights_support import follow
from leeway.streams import Keys, connect
from leeway.weights import ChunkSource, HostCopy, published_manifests
client, keys = connect({url!r}), Keys({run!r})
class Slow(ChunkSource):
    def read(self, *args):
        data = super().read(*args)
        print(args[1], flush=True)
        time.sleep(0.2)
        return data
HostCopy().advance(Slow(client), keys, published_manifests(client, keys))
"""


def test_a_reader_that_is_killed_leaves_nothing_behind_and_its_successor_starts_over(
    redis_server, client, keys
):
    publisher = Publisher(client, keys)
    publisher.send()
    before = set(client.keys())
    code = READER.format(path=[str(Path(__file__).parent), *sys.path], url=redis_server.url, run=keys.run)
    reader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None and reader.stdout.readline() == "0\n"
    reader.kill()
    reader.wait(20)
    assert set(client.keys()) == before
    with HostCopy() as copy:
        follow(client, keys, copy)
        assert_holds(copy, *publisher.sent[0])


def test_chunks_come_from_replicas_and_from_the_primary_when_those_fail(redis_server, client, keys):
    publisher = Publisher(client, keys, chunk_bytes=100)
    manifest = publisher.send()
    with EmbeddedRedis(replica_of=redis_server) as server:
        replica = connect(server.url, wait_s=20)
        source, count = ChunkSource(client, [replica]), manifest.nbytes
        with HostCopy() as copy:
            copy.advance(source, keys, [manifest])
            assert source.read_bytes == {"replica": count, "primary": 0}
            replica.config_set("replica-read-only", "no")
            replica.delete(keys.weight_chunks(0, 1))  # behind: what the primary has is missing there
            source = ChunkSource(client, [replica])
            copy.advance(source, keys, [manifest])
            assert source.read_bytes == {"replica": 0, "primary": count}
            publisher.send(full=True)
            _caught_up(client, replica, keys.weight_chunks(0, 2))
            rewrite(replica, Keys(keys.run), 2, lambda c: flip(c, 3))
            source = ChunkSource(client, [replica])
            follow_from(source, client, keys, copy)
            assert source.read_bytes["replica"] == 300  # three good chunks, then elsewhere
            assert_holds(copy, *publisher.sent[1])
            server.stop()
            publisher.send()
            source = ChunkSource(client, [replica])
            follow_from(source, client, keys, copy)
            assert source.read_bytes["replica"] == 0
            assert_holds(copy, *publisher.sent[2])


def _caught_up(client: redis.Redis, replica: redis.Redis, stream: str) -> None:
    deadline = time.monotonic() + 20
    while replica.xlen(stream) < client.xlen(stream):  # type: ignore[operator]
        assert time.monotonic() < deadline, "the replica does not follow"
        time.sleep(0.02)


def follow_from(source: ChunkSource, client: redis.Redis, keys: Keys, copy: HostCopy) -> None:
    published = published_manifests(client, keys)
    copy.advance(source, keys, plan_chain(published, published[-1].key, copy.held))
