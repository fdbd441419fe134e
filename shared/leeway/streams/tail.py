"""Reading a stream from a position, without a group."""

from __future__ import annotations

from typing import Any, cast

import redis

from leeway.streams.entries import Entry, block_ms, parse_entries
from leeway.streams.retry import retrying


class Tail:
    """Reads a stream from a position onwards, without a group. `last_id`: the newest entry read."""

    def __init__(
        self, client: redis.Redis, stream: str, last_id: bytes | str = "0", *, budget_s: float = 60.0
    ) -> None:
        self.client, self.stream, self.last_id, self.budget_s = client, stream, last_id, budget_s

    def read(self, count: int = 100, block_s: float | None = 1.0) -> list[Entry]:
        """Up to `count` entries after `last_id`; waits at most `block_s` seconds (None: does not wait)."""
        block = None if block_s is None else block_ms(self.client, block_s)
        reply = retrying(
            lambda: self.client.xread({self.stream: self.last_id}, count=count, block=block),
            budget_s=self.budget_s,
            what=f"reading {self.stream}",
        )
        entries = parse_entries(cast(Any, reply)[0][1]) if reply else []
        if entries:
            self.last_id = entries[-1].id
        return entries
