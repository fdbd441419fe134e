"""A version that takes longer to fetch than any budget: progress counts, and what was fetched is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import torch
from slow_link import SlowLink
from weights_support import Publisher, assert_holds

from leeway.streams import Keys, RedisUnavailable, Tail, connect
from leeway.weights import ChunkSource, FetchCancelled, HostCopy, Patience, plan_chain, published_manifests
from leeway_host.redis_server import EmbeddedRedis
from leeway_sampler.transports.kinds.redis import RedisReceiver
from leeway_sampler.watch import WeightWatcher
from leeway_sampler.weight_update import EngineWeights


@pytest.fixture
def link(redis_server: EmbeddedRedis) -> Iterator[SlowLink]:
    found = SlowLink(redis_server.port, 1e9)
    yield found
    found.close()


@pytest.fixture
def far(redis_server: EmbeddedRedis, link: SlowLink) -> Iterator[redis.Redis]:
    """A client at the other end of the slow link."""
    url = urlsplit(redis_server.url)
    client = connect(url._replace(netloc=url.netloc.replace(f":{url.port}", f":{link.port}")).geturl())
    yield client
    client.close()


class Llm:
    """vLLM as far as an update of weights is concerned."""

    async def pause_generation(self, **_: object) -> None:
        pass

    async def resume_generation(self) -> None:
        pass

    async def reset_prefix_cache(self) -> bool:
        return True


class Receiver(RedisReceiver):
    """Without vLLM's workers."""

    async def load(self, llm: Any, manifest: Any) -> None:
        assert self.copy.held is not None
        assert self.copy.held.key == manifest.key


async def test_a_keyframe_at_a_fifth_of_the_needed_rate_arrives(
    client: redis.Redis, keys: Keys, far: redis.Redis, link: SlowLink
) -> None:
    """The budget is for progress: a version that takes five times as long is loaded by the first attempt."""
    budget_s = 1.0
    publisher = Publisher(client, keys, tensors={"w": torch.randn(200_000)}, chunk_bytes=20_000)
    manifest = publisher.send()
    link.bytes_per_s = manifest.wire_nbytes / budget_s / 5
    receiver = Receiver(far, keys, ChunkSource(far), 20.0)
    llm: Any = Llm()
    weights = EngineWeights(llm, "redis", receiver)
    errors: list[str | None] = []

    async def note(error: str | None) -> None:
        errors.append(error)

    async def foreign(manifest: Any) -> None:
        raise AssertionError(manifest)

    watcher = WeightWatcher(Tail(client, keys.weights), weights, budget_s, note, "", foreign)
    watching = asyncio.create_task(watcher.run())
    try:
        await asyncio.wait_for(watcher.ready.wait(), 60)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert errors == [None]
    assert weights.loaded.digest == manifest.digest
    assert weights.fetched_at > 0
    assert_holds(receiver.copy, *publisher.sent[0])
    receiver.copy.close()


@pytest.mark.parametrize("full", [True, False], ids=["keyframe", "delta"])
def test_an_interrupted_fetch_goes_on_at_the_chunk_where_it_stopped(
    client: redis.Redis, keys: Keys, full: bool
) -> None:
    publisher = Publisher(client, keys, chunk_bytes=100 if full else 40)
    publisher.send()
    with HostCopy() as copy:
        copy.advance(ChunkSource(client), keys, published_manifests(client, keys))
        manifest = publisher.send(full=full)
        publisher.send()
        chain = plan_chain(published_manifests(client, keys), manifest.key, copy.held)
        fetched: list[int] = []
        for at in range(1, manifest.chunks):
            with pytest.raises(RedisUnavailable):
                copy.advance(Interrupted(client, at, fetched), keys, chain)
            assert copy.held == publisher.sent[0][0]
        # A newer version has been published in the meantime: it goes on from there.
        chain = plan_chain(published_manifests(client, keys), publisher.sent[2][0].key, copy.held)
        copy.advance(Interrupted(client, -1, fetched), keys, chain)
        assert fetched[: manifest.chunks] == list(range(manifest.chunks)), "each chunk was fetched once"
        assert_holds(copy, *publisher.sent[2])
        copy.undo()
        assert_holds(copy, *publisher.sent[0])


@pytest.mark.parametrize("full", [True, False], ids=["keyframe", "delta"])
def test_whoever_looks_at_an_interrupted_copy_sees_the_version_before(
    client: redis.Redis, keys: Keys, full: bool
) -> None:
    publisher = Publisher(client, keys, chunk_bytes=40)
    publisher.send()
    with HostCopy() as copy:
        copy.advance(ChunkSource(client), keys, published_manifests(client, keys))
        manifest = publisher.send(full=full)
        chain = plan_chain(published_manifests(client, keys), manifest.key, copy.held)
        for at in range(1, manifest.chunks):
            with pytest.raises(RedisUnavailable):
                copy.advance(Interrupted(client, at, []), keys, chain)
            assert_holds(copy, *publisher.sent[0])
        copy.advance(ChunkSource(client), keys, chain)
        assert_holds(copy, *publisher.sent[1])


def test_a_fetch_that_nobody_waits_for_any_more_ends(client: redis.Redis, keys: Keys) -> None:
    publisher = Publisher(client, keys, chunk_bytes=40)
    manifest = publisher.send()
    patience = Patience(60.0)
    source = Interrupted(client, -1, [])
    source.then = lambda index: patience.cancel() if index == 2 else None
    with HostCopy() as copy:
        with pytest.raises(FetchCancelled, match="before chunk 3 of"):
            copy.advance(source, keys, [manifest], patience)
        assert copy.held is None


class Interrupted(ChunkSource):
    """Breaks off before chunk `at`; notes in `fetched` what was read."""

    def __init__(self, client: redis.Redis, at: int, fetched: list[int]) -> None:
        super().__init__(client)
        self.at, self.fetched = at, fetched
        self.then: Any = lambda index: None

    def read(self, stream: str, index: int, size: int, version: int) -> bytes:
        if index == self.at:
            raise RedisUnavailable("gone")
        self.fetched.append(index)
        data = super().read(stream, index, size, version)
        self.then(index)
        return data
