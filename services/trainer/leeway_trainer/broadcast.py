"""Sending theta to the samplers: one walk over the weights that all ranks take part in.

    rank 0: free what nobody needs -> does a version fit? -> full or delta?      (all ranks learn the answer)
    walk: theta, and theta_s for a delta, tensor by tensor -> encoded, chunk by chunk
    published -> theta_s becomes theta;  not published -> theta_s and the samplers stay as they are

A delta is encoded against theta_s, which holds in the wire's numbers what was published last, so that there
is no other copy of the weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import redis
import torch

from leeway.config import RunConfig
from leeway.errors import StalledError
from leeway.messages import SamplerStatus
from leeway.statuses import read_statuses, split_live
from leeway.streams import KEYFRAME_FIELD, Keys, now, retrying
from leeway.telemetry.tracing import traceparent
from leeway.weights import (
    VersionKey,
    WeightManifest,
    WeightsTooLarge,
    decide_codec,
    free_versions,
    plan_free,
    publish_offer,
    publish_weights,
    published_manifests,
    room_for,
)
from leeway.weights.manifest import ITEM_BYTES
from leeway_trainer import nccl
from leeway_trainer.model import DTYPES
from leeway_trainer.policy import Policy
from leeway_trainer.ranks import Ranks
from leeway_trainer.snapshot import Snapshot, wire_tensors

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
NO_ROOM, FULL, DELTA, DONE = 0, 1, 2, 3


class Broadcaster:
    """Publishes versions of one run epoch. Every rank calls `publish`; only rank 0 has a client."""

    def __init__(
        self, config: RunConfig, ranks: Ranks, client: redis.Redis | None, keys: Keys, epoch: int
    ) -> None:
        self.config, self.ranks, self.client, self.keys, self.epoch = config, ranks, client, keys, epoch
        if config.weights.transport == "nccl":
            nccl.check_device(ranks.device)
        self.budget_s = config.redis.reconnect_s
        self.last: WeightManifest | None = None
        """What was published last, on rank 0."""
        self._problem = ""
        self._hopeless: VersionKey | None = None
        """A version that no other could follow, for lack of room."""

    def publish(
        self, policy: Policy, snapshot: Snapshot, *, version: int, step: int, keep_old: bool = False
    ) -> None:
        """Send theta as `version` and make it theta_s (with `keep_old` the caller does that, by `refresh`).

        Raises WeightsTooLarge, on every rank alike, when Redis has no room for it; nothing has changed then.
        """
        if self.config.weights.transport == "nccl":
            self._publish_nccl(policy, version, step)
        else:
            self._publish_redis(policy, snapshot, version, step)
        if not keep_old:
            self.refresh(policy, snapshot, step=step)

    def _publish_redis(self, policy: Policy, snapshot: Snapshot, version: int, step: int) -> None:
        plan = self.ranks.share_int(self._plan(policy) if self.client is not None else DONE)
        while plan in (FULL, DELTA):
            tensors: Iterable[Any] = wire_tensors(policy, self._dtype, step=step)
            if plan == DELTA:
                tensors = snapshot.beside(tensors, self._dtype)
            plan = self.ranks.share_int(self._send(plan, tensors, version, step))
        if plan == NO_ROOM:
            self._hopeless = None if self.last is None else self.last.key
            raise WeightsTooLarge(self._problem or "rank 0 found no room for the weights")

    def refresh(self, policy: Policy, snapshot: Snapshot, *, step: int) -> None:
        """Make theta_s what theta is; called by all ranks, before the next publication."""
        snapshot.refresh(wire_tensors(policy, self._dtype, step=step))

    def keyframe_wanted(self) -> bool:
        """Whether a live sampler cannot get the version that was published last in any other way."""
        last = self.last
        if last is None or last.key == self._hopeless:
            return False
        return any(status.stuck == last.key for status in self._samplers())

    def _publish_nccl(self, policy: Policy, version: int, step: int) -> None:
        specs = nccl.tensor_specs(wire_tensors(policy, self._dtype, step=step))
        weights = self.config.weights
        offer = nccl.plan_offer(
            self._awaited_samplers() if self.client is not None else [],
            address=weights.nccl_address,
            port=weights.nccl_port,
            tensor_parallel_size=self.config.sampler.tensor_parallel_size,
        )
        if self.client is not None:
            self._free()
            self.last = publish_offer(
                self.client,
                self.keys,
                offer,
                specs,
                epoch=self.epoch,
                version=version,
                step=step,
                traceparent=traceparent(),
                budget_s=self.budget_s,
            )
        nccl.send(offer, specs, wire_tensors(policy, self._dtype, step=step), self.ranks.rank)

    # -- rank 0 ----------------------------------------------------------------------------------------

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.config.weights.dtype]

    def _retry(self, call: Any, what: str) -> Any:
        return retrying(call, budget_s=self.budget_s, what=what)

    def _samplers(self) -> list[SamplerStatus]:
        """Live samplers."""
        assert self.client is not None
        statuses = read_statuses(self.client, self.keys, budget_s=self.budget_s)
        return split_live(statuses, now(), self.config.sync.ticket_idle_s)[0]

    def _awaited_samplers(self) -> list[SamplerStatus]:
        """Live samplers; before the first version, as many as the run starts with."""
        deadline = time.monotonic() + self.config.sampler.start_timeout_s
        wanted = self.config.sampler.replicas if self.last is None else 1
        while len(found := self._samplers()) < wanted:
            if time.monotonic() > deadline:
                raise StalledError(f"{len(found)} of {wanted} samplers are there to take weights by NCCL")
            time.sleep(0.2)
        return found

    def _free(self) -> list[WeightManifest]:
        """Free what nobody needs; returns what is left."""
        assert self.client is not None
        client = self.client
        held = [(s.epoch, s.version) for s in self._samplers() if s.version >= 0]
        published = self._retry(lambda: published_manifests(client, self.keys), "reading manifests")
        old = plan_free(published, held)
        self._retry(lambda: free_versions(client, self.keys, old), "freeing weights")
        return [manifest for manifest in published if manifest not in old]

    def _plan(self, policy: Policy) -> int:
        """FULL, DELTA or NO_ROOM, after freeing what nobody needs."""
        assert self.client is not None
        client = self.client
        published = self._free()
        memory = self._retry(lambda: client.info("memory"), "reading the server's memory")
        limit = self.config.weights.max_redis_mib
        self._room = room_for(published, limit_bytes=None if limit is None else limit << 20, memory=memory)
        self._full_bytes = (
            sum(getattr(param, "ds_numel", param.numel()) for _, param in policy.named_parameters())
            * ITEM_BYTES[self.config.weights.dtype]
        )
        demanded = self._retry(
            lambda: client.hdel(self.keys.state, KEYFRAME_FIELD), "reading whether a keyframe is wanted"
        )
        ours = bool(published) and self.last is not None and published[-1].key == self.last.key
        codec = decide_codec(
            self.epoch,
            published,
            keyframe_every=self.config.weights.keyframe_every,
            demanded=bool(demanded) or not ours or self.keyframe_wanted(),
        )
        return self._fits(FULL) if codec == "full" else DELTA

    def _fits(self, plan: int) -> int:
        """`plan`, or NO_ROOM when a full version does not fit."""
        if self._room is None or self._full_bytes <= self._room:
            return plan
        return self._no_room(f"{self._full_bytes} bytes")

    def _no_room(self, size: str) -> int:
        self._problem = (
            f"new weights of {size} do not fit the memory that Redis has left for them "
            f"({max(0, self._room or 0)} bytes; weights.max_redis_mib={self.config.weights.max_redis_mib}, "
            "or the server's maxmemory less a tenth): raise one of them"
        )
        return NO_ROOM

    def _send(self, plan: int, tensors: Iterable[Any], version: int, step: int) -> int:
        """Walk through `tensors` to the end; DONE, FULL (the delta is no smaller) or NO_ROOM."""
        if self.client is None:
            _walk(tensors)
            return DONE  # unused: rank 0's answer counts
        limits = [self._room, self._full_bytes if plan == DELTA else None]
        base = self.last if plan == DELTA else None
        tensors = iter(tensors)  # goes on where it was left when a version turns out too large
        try:
            self.last = publish_weights(
                self.client,
                self.keys,
                epoch=self.epoch,
                version=version,
                step=step,
                tensors=tensors,
                base=base,
                wire_dtype=self.config.weights.dtype,
                chunk_bytes=self.config.weights.chunk_bytes,
                traceparent=traceparent(),
                limit_bytes=min((limit for limit in limits if limit is not None), default=None),
                budget_s=self.budget_s,
            )
        except WeightsTooLarge as exc:
            log.info("%s", exc)
            _walk(tensors)
            if plan == DELTA:
                return self._fits(FULL)
            return self._no_room("more bytes than that")
        log.info("published version %d (%s, %d bytes)", version, self.last.codec, self.last.wire_nbytes)
        return DONE


def _walk(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Every rank walks to the end, because ZeRO-3 gathers on the way."""
    for _ in tensors:
        pass
