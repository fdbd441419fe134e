"""Removing consumers that have left for good from their groups, which otherwise grow for ever."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import redis

from leeway.streams.retry import retrying


def remove_idle_consumers(
    client: redis.Redis, stream: str, group: str, kept: Collection[str], *, idle_s: float, budget_s: float
) -> int:
    """Remove consumers without pending entries that have done nothing for `idle_s` seconds.

    Those named in `kept` stay. Returns how many entries were pending after all when their consumer was
    removed: one that wakes up between the look and the removal loses what it takes. Raises RedisUnavailable.
    """

    def remove() -> int:
        try:
            found: Any = client.xinfo_consumers(stream, group)
        except redis.ResponseError as error:
            if "no such key" in str(error) or "NOGROUP" in str(error):
                return 0
            raise
        names = [
            consumer["name"].decode()
            for consumer in found
            if not consumer["pending"] and consumer["idle"] >= 1000 * idle_s
        ]
        gone = [name for name in names if name not in kept]
        return sum(int(client.xgroup_delconsumer(stream, group, name)) for name in gone)

    return retrying(remove, budget_s=budget_s, what=f"removing consumers of {stream}")
