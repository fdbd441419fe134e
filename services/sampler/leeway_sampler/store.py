"""WeightStore: the sampler's verified host copy of its weights, which the engine's workers load from.

stage(manifest)           chain from what is held, or from a keyframe -> read, decode, verify
copy.undo, copy.keep      after the engine refused or took it

The copy belongs to the sampler's process; workers map it (weight_engine.py), also those of a tensor-parallel
group, each of which takes its shard. Nothing of Redis is needed while the engine is paused.
"""

from __future__ import annotations

import random
import time
from typing import Any

import redis

from leeway.config import RunConfig
from leeway.streams import Keys, connect, replica_url, retrying
from leeway.weights import ChunkSource, HostCopy, WeightManifest, plan_chain, published_manifests


class WeightStore:
    """Not for several threads at once."""

    def __init__(self, client: redis.Redis, keys: Keys, source: ChunkSource, budget_s: float) -> None:
        self.client, self.keys, self.source, self.budget_s = client, keys, source, budget_s
        self.copy = HostCopy()

    @classmethod
    def connect(cls, config: RunConfig, url: str, run: str) -> WeightStore:
        """Connections of its own to the server and to redis.read_urls.

        Raises RedisRefused and RedisUnavailable.
        """
        timeout_s, budget_s = config.redis.socket_timeout_s, config.redis.reconnect_s
        client = connect(url, socket_timeout_s=timeout_s, wait_s=budget_s)
        places = random.sample(config.redis.read_urls, len(config.redis.read_urls))  # spreads the samplers
        replicas = [  # one that is away now may come later
            redis.Redis.from_url(
                replica_url(place, url), socket_timeout=timeout_s, socket_connect_timeout=timeout_s
            )
            for place in places
        ]
        return cls(client, Keys(run), ChunkSource(client, replicas, budget_s=budget_s), budget_s)

    def stage(self, manifest: WeightManifest, deadline: float) -> None:
        """Hold `manifest`. Raises WeightsCorrupt, TimeoutError (time.monotonic() > deadline) or
        RedisUnavailable, and holds then what it held before.
        """
        held = self.copy.held
        if held is not None and (held.key, held.digest) == (manifest.key, manifest.digest):
            return  # a repeated attempt to load it
        published = retrying(
            lambda: published_manifests(self.client, self.keys),
            budget_s=max(0.1, min(self.budget_s, deadline - time.monotonic())),
            what="reading manifests",
        )
        chain = plan_chain(published, manifest.key, held)
        self.copy.advance(self.source, self.keys, chain, deadline)

    def update_info(self) -> dict[str, Any]:
        """What the workers must know to load the version that is held (weight_engine.HostUpdateInfo)."""
        assert self.copy.held is not None, "nothing was staged"
        return {"path": self.copy.path, "manifest": self.copy.held.model_dump_json()}

    def forget(self) -> None:
        """Hold nothing: the next version is read from a keyframe on."""
        self.copy.close()

    def close(self) -> None:
        self.forget()
        self.client.close()
