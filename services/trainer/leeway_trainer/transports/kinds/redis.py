"""weights.transport=redis: a version travels through Redis, in full or as what changed.

    rank 0: does a version fit? -> full or delta?                               (all ranks learn the answer)
    walk over theta (and theta_s, for a delta), tensor by tensor -> encoded, chunk by chunk
    a delta that is no smaller than the whole -> one more walk, in full

A delta is encoded against theta_s, which holds the numbers of the version before, so that no other copy of
the weights is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from leeway.streams import KEYFRAME_FIELD
from leeway.telemetry.tracing import traceparent
from leeway.weights import WeightManifest, WeightsTooLarge, decide_codec, publish_weights, room_for
from leeway_trainer.transports.base import Link, NewVersion, Transport

log = logging.getLogger(__name__)


class Walk(IntEnum):
    """What all ranks do next."""

    NO_ROOM = 0
    FULL = 1
    DELTA = 2
    DONE = 3


class RedisTransport(Transport):
    """Chunks and manifest in Redis; samplers verify every digest."""

    def publish(self, new: NewVersion, link: Link) -> WeightManifest | None:
        """See Transport. A version needs room for a keyframe, or for its delta."""
        attempt = Attempt(new, link)
        walk = link.ranks.share_int(attempt.plan() if link.ranks.first else Walk.DONE)
        while walk in (Walk.FULL, Walk.DELTA):
            tensors = new.changes() if walk == Walk.DELTA else new.tensors()
            walk = link.ranks.share_int(attempt.send(Walk(walk), tensors))
        if walk == Walk.NO_ROOM:
            raise WeightsTooLarge(attempt.problem or "rank 0 found no room for the weights in Redis")
        return attempt.manifest


class Attempt:
    """One version on its way; `plan` is called on rank 0 alone."""

    def __init__(self, new: NewVersion, link: Link) -> None:
        self.new, self.link = new, link
        self.manifest: WeightManifest | None = None
        self.problem = ""
        self._room: int | None = None

    def plan(self) -> Walk:
        """FULL, DELTA or NO_ROOM."""
        new, link, weights = self.new, self.link, self.link.config.weights
        memory: Mapping[str, int] = link.call(lambda client: client.info("memory"), "reading memory use")
        limit = weights.max_redis_mib
        self._room = room_for(
            new.published, limit_bytes=None if limit is None else limit << 20, memory=memory
        )
        demanded = link.call(
            lambda client: client.hdel(link.keys.state, KEYFRAME_FIELD),
            "reading whether a keyframe is wanted",
        )
        follows = bool(new.published) and new.base is not None and new.published[-1].key == new.base.key
        codec = decide_codec(
            link.epoch,
            new.published,
            keyframe_every=weights.keyframe_every,
            demanded=bool(demanded) or not follows or new.resend,
        )
        return Walk.DELTA if codec == "delta" else self._full()

    def send(self, walk: Walk, tensors: Iterable[Any]) -> Walk:
        """Consume `tensors`; DONE, FULL (the delta is no smaller) or NO_ROOM. Rank 0's answer counts."""
        tensors = iter(tensors)  # stays where it was when a version turns out to be too large
        if self.link.client is not None:
            try:
                self._publish(self.link.client, walk, tensors)
            except WeightsTooLarge as exc:
                log.info("%s", exc)
                walk_to_end(tensors)
                return self._full() if walk == Walk.DELTA else self._no_room("more bytes than that")
        walk_to_end(tensors)
        return Walk.DONE

    def _publish(self, client: Any, walk: Walk, tensors: Iterable[Any]) -> None:
        new, link, weights = self.new, self.link, self.link.config.weights
        limits = [self._room, new.nbytes if walk == Walk.DELTA else None]
        self.manifest = publish_weights(
            client,
            link.keys,
            epoch=link.epoch,
            version=new.number,
            step=new.step,
            tensors=tensors,
            base=new.base if walk == Walk.DELTA else None,
            wire_dtype=weights.dtype,
            chunk_bytes=weights.chunk_bytes,
            limit_bytes=min((limit for limit in limits if limit is not None), default=None),
            config=link.identity.digest,
            traceparent=traceparent(),
            budget_s=link.budget_s,
        )

    def _full(self) -> Walk:
        if self._room is None or self.new.nbytes <= self._room:
            return Walk.FULL
        return self._no_room(f"{self.new.nbytes} bytes")

    def _no_room(self, size: str) -> Walk:
        self.problem = (
            f"new weights of {size} do not fit the memory that Redis has left for them "
            f"({max(0, self._room or 0)} bytes; "
            f"weights.max_redis_mib={self.link.config.weights.max_redis_mib}, "
            "or the server's maxmemory less a tenth): raise one of them"
        )
        return Walk.NO_ROOM


def walk_to_end(tensors: Iterable[Any]) -> None:
    """Consume the rest: every rank walks to the end, because ZeRO-3 gathers on the way."""
    for _ in tensors:
        pass


TRANSPORT = RedisTransport()
