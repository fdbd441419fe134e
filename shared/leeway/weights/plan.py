"""Decisions about weight versions, without I/O: how to send, what to read, what to free, what fits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from leeway.weights.manifest import WeightManifest, WeightsCorrupt

VersionKey = tuple[int, int]
"""(run epoch, weight version): the order in which versions replace each other."""


def decide_codec(
    epoch: int, published: Sequence[WeightManifest], *, keyframe_every: int, demanded: bool
) -> Literal["full", "delta"]:
    """How the next version of `epoch` is sent.

    `published`: manifests in Redis, in order. A keyframe for the first version of an epoch, when one was
    demanded, and every `keyframe_every` versions; otherwise a delta against the newest version.
    """
    for since, manifest in enumerate(reversed(published), 1):
        if manifest.epoch != epoch:
            break
        if manifest.base is None:
            return "full" if demanded or since >= keyframe_every else "delta"
    return "full"


def plan_chain(
    published: Sequence[WeightManifest], wanted: VersionKey, held: WeightManifest | None
) -> list[WeightManifest]:
    """The versions to apply in order to get from `held` (None: nothing) to `wanted`.

    Deltas on top of `held` if they lead there, else the newest keyframe up to `wanted` and the deltas after
    it. Raises WeightsCorrupt when a version of the chain is no longer published.
    """
    by_key = {m.key: m for m in published}
    chain: list[WeightManifest] = []
    key = wanted
    while True:
        manifest = by_key.get(key)
        if manifest is None:
            needed = f"; the delta to version {chain[-1].version} needs it" if chain else ""
            raise WeightsCorrupt(f"no longer published{needed}", version=key[1])
        chain.append(manifest)
        if manifest.base is None:
            return chain[::-1]
        key = (manifest.epoch, manifest.base.version)
        if held is not None and held.key == key and held.digest == manifest.base.digest:
            return chain[::-1]


def plan_free(published: Sequence[WeightManifest], held: Collection[VersionKey]) -> list[WeightManifest]:
    """The versions that no sampler needs any more.

    `held`: the versions of live samplers. The newest keyframe and the versions after it are kept for samplers
    that join later; older versions until every live sampler holds that keyframe or a later version.
    """
    keyframes = [m.key for m in published if m.base is None]
    if not keyframes:
        return []
    oldest = min(held, default=keyframes[-1])
    start = max((k for k in keyframes if k <= oldest), default=keyframes[0])
    if published[-1].epoch > start[0]:  # of an earlier start of the trainer: all void
        start = next(k for k in keyframes if k[0] == published[-1].epoch)
    return [m for m in published if m.key < start]


def room_for(
    published: Sequence[WeightManifest],
    *,
    limit_bytes: int | None,
    memory: Mapping[str, int],
    reserve: float = 0.1,
) -> int | None:
    """Bytes that a new version may use in Redis; None: no limit.

    `limit_bytes`: weights.max_redis_mib. `memory`: `maxmemory` (0: none) and `used_memory` of INFO memory; a
    share `reserve` of maxmemory is left for rollouts and tickets.
    """
    rooms = []
    if limit_bytes is not None:
        rooms.append(limit_bytes - sum(m.wire_nbytes for m in published))
    if memory.get("maxmemory"):
        rooms.append(int(memory["maxmemory"] * (1 - reserve)) - memory["used_memory"])
    return min(rooms) if rooms else None
