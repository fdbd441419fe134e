"""What a weight transport does on the trainer's side, and what it is given to do it with.

    check     once, before the model is loaded: can this machine use the transport?
    publish   for every version: move the weights, or offer them, and write the manifest to Redis
    free      when versions are dropped: delete what of them is not in Redis

Everything else is the same for all transports and belongs to `leeway_trainer.broadcast.Broadcaster`: which
versions are dropped when, and when a sampler needs a version sent again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import redis

from leeway.config import RunConfig
from leeway.config.identity import Identity, identify
from leeway.messages import SamplerStatus
from leeway.statuses import read_statuses, split_live
from leeway.streams import Keys, now, retrying
from leeway.telemetry.tracing import traceparent
from leeway.weights import TensorSpec, WeightManifest, publish_offer
from leeway_trainer.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class NewVersion:
    """The version to publish. Rank 0 alone knows what was published before it."""

    number: int
    step: int
    """Optimiser steps done."""
    nbytes: int
    """Size of all tensors in their wire type."""
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """Starts a walk over (name, tensor in wire type). Every rank must start it and walk to its end, because
    ZeRO-3 gathers on the way; a tensor is valid until the next one."""
    changes: Callable[[], Iterator[tuple[str, Tensor, Tensor]]]
    """As `tensors`, with what `base` holds in the tensor's place as a third item."""
    base: WeightManifest | None
    """Rank 0: the version published before in this run epoch; None before the first."""
    published: Sequence[WeightManifest]
    """Rank 0: all versions that can still be read, oldest first."""
    resend: bool
    """Rank 0: a live sampler cannot load `base` and needs all of the weights."""


@dataclass(frozen=True)
class Link:
    """Where the versions of one run epoch are published. Only rank 0 has a `client`."""

    config: RunConfig
    ranks: Ranks
    client: redis.Redis | None
    keys: Keys
    epoch: int

    @cached_property
    def identity(self) -> Identity:
        """Of the trainer's configuration; manifests carry its digest."""
        return identify(self.config)

    @property
    def budget_s(self) -> float:
        """How long a call waits while Redis is away."""
        return self.config.redis.reconnect_s

    def call(self, command: Callable[[redis.Redis], T], what: str) -> T:
        """Rank 0: run `command`, repeated for up to `budget_s`. Raises RedisUnavailable."""
        client = self.client
        assert client is not None, "only rank 0 talks to Redis"
        return retrying(lambda: command(client), budget_s=self.budget_s, what=what)

    def live_samplers(self) -> list[SamplerStatus]:
        """Rank 0: samplers of this configuration whose last heartbeat is at most sync.ticket_idle_s old."""
        assert self.client is not None, "only rank 0 talks to Redis"
        statuses = read_statuses(self.client, self.keys, budget_s=self.budget_s)
        live, _ = split_live(statuses, now(), self.config.sync.ticket_idle_s)
        return [status for status in live if status.config == self.identity.digest]

    def announce(
        self, new: NewVersion, offer: Mapping[str, Any], specs: Sequence[TensorSpec]
    ) -> WeightManifest:
        """Rank 0: write the manifest of a version whose bytes are not in Redis.

        `offer`: what the samplers' side of the transport needs to get them, as JSON.
        """
        assert self.client is not None, "only rank 0 talks to Redis"
        return publish_offer(
            self.client,
            self.keys,
            transport=self.config.weights.transport,
            offer=dict(offer),
            specs=specs,
            epoch=self.epoch,
            version=new.number,
            step=new.step,
            config=self.identity.digest,
            traceparent=traceparent(),
            budget_s=self.budget_s,
        )


class Transport(ABC):
    """One way to move weights from the trainer to the samplers. Instances hold no state of a run."""

    def check(self, config: RunConfig, ranks: Ranks) -> None:  # noqa: B027 (optional)
        """Raise UsageError where it cannot work; called by all ranks, before the model is loaded."""

    @abstractmethod
    def publish(self, new: NewVersion, link: Link) -> WeightManifest | None:
        """Publish a version; called by all ranks. Returns the manifest on rank 0 and None elsewhere.

        Raises WeightsTooLarge, on every rank alike, when there is no room for it; nothing is published then.
        """

    def free(self, versions: Sequence[WeightManifest], link: Link) -> None:  # noqa: B027 (optional)
        """Rank 0: delete what versions of this transport hold outside Redis; their manifests are gone."""
