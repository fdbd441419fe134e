"""weights.transport=redis: the sampler keeps a verified host copy of its weights, and workers load from it.

    stage      chain from the held version, or from a keyframe -> read, decode, verify
    load       workers map the copy (redis_engine.py); each of a tensor-parallel group takes its shard
    commit     keep the copy
    rollback   undo the last change of the copy, bit for bit

The copy is in the sampler's process. Redis is not needed while the engine is paused.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import redis

from leeway.streams import Keys, connect, replica_url, retrying
from leeway.weights import (
    ChunkSource,
    HostCopy,
    Patience,
    WeightManifest,
    plan_chain,
    published_manifests,
)
from leeway_sampler.transports.base import Endpoint, Transport, WeightReceiver, update_weights

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class RedisReceiver(WeightReceiver):
    """See the module's docstring. Not safe for use by several threads at once."""

    def __init__(self, client: redis.Redis, keys: Keys, source: ChunkSource, budget_s: float) -> None:
        self.client, self.keys, self.source, self.budget_s = client, keys, source, budget_s
        self.copy = HostCopy()

    @classmethod
    def connect(cls, endpoint: Endpoint) -> RedisReceiver:
        """Open connections to the server and to redis.read_urls, for weights alone.

        Raises RedisRefused and RedisUnavailable.
        """
        config, url = endpoint.config.redis, endpoint.redis_url
        timeout_s, budget_s = config.socket_timeout_s, config.reconnect_s
        client = connect(url, socket_timeout_s=timeout_s, wait_s=budget_s)
        read_urls = random.sample(config.read_urls, len(config.read_urls))  # spreads the samplers
        replicas = [  # not checked now: a replica that is down may come back
            redis.Redis.from_url(
                replica_url(read_url, url), socket_timeout=timeout_s, socket_connect_timeout=timeout_s
            )
            for read_url in read_urls
        ]
        source = ChunkSource(client, replicas, budget_s=budget_s)
        return cls(client, Keys(endpoint.run), source, budget_s)

    async def init_engine(self, llm: AsyncLLM) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))

    def stage(self, manifest: WeightManifest, patience: Patience) -> None:
        """Raises WeightsCorrupt, TimeoutError or RedisUnavailable."""
        held = self.copy.held
        if held is not None and (held.key, held.digest) == (manifest.key, manifest.digest):
            return  # a repeated attempt to load it
        published = retrying(
            lambda: published_manifests(self.client, self.keys),
            budget_s=max(0.1, min(self.budget_s, patience.left_s)),
            what="reading manifests",
        )
        chain = plan_chain(published, manifest.key, held)
        self.copy.advance(self.source, self.keys, chain, patience)

    async def load(self, llm: AsyncLLM, manifest: WeightManifest) -> None:
        await update_weights(llm, self.update_info(), manifest.version)

    def update_info(self) -> dict[str, Any]:
        """What workers need to load the held version (redis_engine.HostUpdateInfo)."""
        assert self.copy.held is not None, "nothing was staged"
        return {"path": self.copy.path, "manifest": self.copy.held.model_dump_json()}

    def commit(self) -> None:
        self.copy.keep()

    def rollback(self) -> WeightManifest | None:
        self.copy.undo()
        return self.copy.held

    def forget(self) -> None:
        self.copy.close()

    def close(self) -> None:
        self.forget()
        self.client.close()


TRANSPORT = Transport(
    backend="redis",
    open=RedisReceiver.connect,
    worker=("leeway_sampler.transports.redis_engine", "RedisWeightTransferEngine"),
)
