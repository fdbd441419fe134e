"""What a read of a stream returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import redis

from leeway.messages import Fields


@dataclass(frozen=True)
class Entry:
    """One stream entry as read."""

    id: bytes
    fields: Fields


def parse_entries(raw: Iterable[tuple[bytes, Fields | None]]) -> list[Entry]:
    """Entries of a reply; one that was deleted while it was pending has no fields and is left out."""
    return [Entry(entry_id, dict(fields)) for entry_id, fields in raw if fields]


def block_ms(client: redis.Redis, block_s: float) -> int:
    """Milliseconds that a read may block: it must end before the socket times out, or its entries are
    delivered to a connection that is already closed.
    """
    limit = client.connection_pool.connection_kwargs.get("socket_timeout") or 5.0
    return max(1, int(1000 * min(block_s, limit / 2)))
