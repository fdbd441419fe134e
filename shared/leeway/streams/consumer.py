"""Reading a stream through a consumer group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

from leeway.streams.entries import Entry, block_ms, parse_entries
from leeway.streams.retry import LOST, retrying

log = logging.getLogger(__name__)

T = TypeVar("T")


PAGE = 1000
"""Pending entries that are looked at in one call."""
MAX_CREATIONS = 10
"""How often one call creates its group again, on a server that loses everything again and again."""


class Consumer:
    """One consumer of a group on a stream.

    `read` returns each entry once; entries stay pending until `ack`. After a lost connection the next `read`
    first returns pending entries that it has not returned yet. All methods raise RedisUnavailable after
    `budget_s` seconds without the server.

    Another consumer takes over entries without a heartbeat: `claim_stale`, or `find_stale` and `claim` for
    one who needs to know from whom.
    """

    def __init__(
        self, client: redis.Redis, stream: str, group: str, name: str, *, budget_s: float = 60.0
    ) -> None:
        # redis-py would repeat a read whose reply was lost, and the entries of that reply would stay pending
        # without ever being returned.
        self.client = _without_silent_retries(client)
        self.stream, self.group, self.name = stream, group, name
        self.budget_s = budget_s
        self.held: set[bytes] = set()
        self._recovered_to: bytes | None = b"-"
        """Where in the list of own pending entries the search for unreturned ones is; None: at its end."""
        self.ensure()

    def ensure(self) -> None:
        """Create stream and group if they are missing; the group starts at the beginning of the stream."""

        def create() -> None:
            try:
                self.client.xgroup_create(self.stream, self.group, id="0", mkstream=True)
            except ResponseError as exc:
                if "BUSYGROUP" not in str(exc):
                    raise

        retrying(create, budget_s=self.budget_s, what=f"creating group {self.group} on {self.stream}")

    def _call(self, call: Callable[[], T]) -> T:
        def guarded() -> T:
            for _ in range(MAX_CREATIONS):
                try:
                    return call()
                except LOST:
                    self._recovered_to = b"-"
                    raise
                except ResponseError as exc:
                    if "NOGROUP" not in str(exc):
                        raise
                log.warning("group %s on %s no longer exists; creating it again", self.group, self.stream)
                self.ensure()
            return call()

        return retrying(guarded, budget_s=self.budget_s, what=f"reading {self.stream}")

    def read(self, count: int, block_s: float = 1.0) -> list[Entry]:
        """Up to `count` entries; waits at most `block_s` seconds for the first (0: does not wait)."""

        def read() -> list[Entry]:
            lost = self._find_unreturned(count)
            if lost:
                return lost
            block = block_ms(self.client, block_s) if block_s else None
            reply = self.client.xreadgroup(
                self.group, self.name, {self.stream: ">"}, count=count, block=block
            )
            return parse_entries(cast(Any, reply)[0][1]) if reply else []

        entries = self._call(read)
        self.held.update(entry.id for entry in entries)
        return entries

    def look_again(self) -> None:
        """Have `read` look for pending entries that it has not returned, as after a lost connection.

        A read that arrives at the server after its connection was given up leaves such entries behind.
        """
        self._recovered_to = b"-"

    def _find_unreturned(self, count: int) -> list[Entry]:
        """Up to `count` entries that are pending for this consumer and were not returned yet.

        Reads the list of pending entries page by page and only those entries that are missing: XREADGROUP
        would send all of them, and count each as delivered again.
        """
        while self._recovered_to is not None:
            page = self._pending(self._recovered_to, b"+", PAGE)
            missing = [p["message_id"] for p in page if p["message_id"] not in self.held]
            chosen = missing[:count]
            entries = self._fetch(chosen)
            if len(chosen) < len(missing):
                self._recovered_to = b"(" + chosen[-1]
            elif len(page) == PAGE:
                self._recovered_to = b"(" + page[-1]["message_id"]
            else:
                self._recovered_to = None
            if entries:
                return entries
        return []

    def _pending(self, first: bytes, last: bytes, count: int) -> list[dict[str, Any]]:
        found: Any = self.client.xpending_range(
            self.stream, self.group, cast(Any, first), cast(Any, last), count, consumername=self.name
        )
        return list(found)

    def _fetch(self, ids: Sequence[bytes]) -> list[Entry]:
        """The entries with these ids, without those that were deleted."""
        with self.client.pipeline(transaction=False) as pipe:
            for entry_id in ids:
                pipe.xrange(self.stream, entry_id, entry_id)
            found: list[Any] = pipe.execute()
        return parse_entries([raw for reply in found for raw in reply])

    def ack(self, ids: Sequence[bytes], *, delete: bool = True) -> None:
        """Acknowledge entries whose effect is durable; `delete` also removes them (one group per stream)."""
        if not ids:
            return

        def ack() -> None:
            with self.client.pipeline(transaction=True) as pipe:
                self.queue_ack(pipe, ids, delete=delete)
                pipe.execute()

        self._call(ack)
        self.held.difference_update(ids)

    def queue_ack(self, pipe: Any, ids: Sequence[bytes], *, delete: bool = True) -> None:
        """Queue the acknowledgement in a MULTI of the caller, who calls `forget` once it is executed."""
        pipe.xack(self.stream, self.group, *ids)
        if delete:
            pipe.xdel(self.stream, *ids)

    def forget(self, ids: Iterable[bytes]) -> None:
        """Drop entries that the caller has acknowledged."""
        self.held.difference_update(ids)

    def refresh(self, ids: Sequence[bytes]) -> None:
        """Heartbeat: the entries are in progress (resets their idle time, keeps their delivery count)."""
        if ids:
            self._call(
                lambda: self.client.xclaim(
                    self.stream, self.group, self.name, 0, cast(Any, list(ids)), justid=True
                )
            )

    def claim_stale(self, idle_s: float, count: int) -> list[Entry]:
        """Take over up to `count` entries that had no heartbeat for `idle_s` seconds."""
        entries: list[Entry] = []
        start: Any = b"0-0"
        while True:
            start, raw = self._claim_page(idle_s, count - len(entries), start)
            entries += [entry for entry in parse_entries(raw) if entry.id not in self.held]
            self.held.update(entry.id for entry in entries)
            if start == b"0-0" or len(entries) >= count:
                return entries

    def _claim_page(self, idle_s: float, count: int, start: bytes) -> tuple[bytes, Any]:
        """One look at some ten times `count` pending entries from `start`; also where the next one starts."""
        reply = self._call(
            lambda: self.client.xautoclaim(
                self.stream, self.group, self.name, int(idle_s * 1000), start_id=cast(Any, start), count=count
            )
        )
        return cast(Any, reply)[0], cast(Any, reply)[1]

    def owned(self) -> set[bytes]:
        """The entries that are pending for this consumer: others may have taken over some of what it read."""
        found: set[bytes] = set()
        start: bytes | None = b"-"
        while start is not None:
            page = self._call(lambda first=start: self._pending(first, b"+", PAGE))  # type: ignore[misc]
            found.update(p["message_id"] for p in page)
            start = b"(" + page[-1]["message_id"] if len(page) == PAGE else None
        return found

    def find_stale(self, idle_s: float, count: int) -> list[Stale]:
        """Up to `count` entries of other consumers that had no heartbeat for `idle_s` seconds."""
        found: list[Stale] = []
        start: bytes | None = b"-"
        while start is not None and len(found) < count:
            page = self._idle(start, idle_s)
            found += [
                Stale(p["message_id"], p["consumer"].decode())
                for p in page
                if p["consumer"] != self.name.encode()
            ]
            start = b"(" + page[-1]["message_id"] if len(page) == PAGE else None
        return found[:count]

    def _idle(self, start: bytes, idle_s: float) -> list[dict[str, Any]]:
        reply: Any = self._call(
            lambda: self.client.xpending_range(
                self.stream, self.group, cast(Any, start), cast(Any, b"+"), PAGE, idle=int(idle_s * 1000)
            )
        )
        return list(reply)

    def look(self, ids: Sequence[bytes]) -> list[Entry]:
        """The entries with these ids, which stay with whoever has them; deleted ones are left out."""
        return self._call(lambda: self._fetch(ids))

    def claim(self, ids: Sequence[bytes], idle_s: float, queue: Callable[[Any], object]) -> list[Entry]:
        """Take over those of the entries that still had no heartbeat for `idle_s` seconds.

        `queue` puts commands on the pipeline of the same MULTI. If its reply is lost, `read` finds what was
        claimed.
        """

        def claim() -> list[Entry]:
            with self.client.pipeline(transaction=True) as pipe:
                queue(pipe)
                pipe.xclaim(self.stream, self.group, self.name, int(idle_s * 1000), cast(Any, list(ids)))
                return parse_entries(pipe.execute()[-1])

        entries = [entry for entry in self._call(claim) if entry.id not in self.held]
        self.held.update(entry.id for entry in entries)
        return entries

    def remove(self, consumer: str) -> None:
        """Remove a consumer that will not read again, unless entries are pending for it."""

        def remove() -> None:
            if not self.client.xpending_range(
                self.stream, self.group, cast(Any, b"-"), cast(Any, b"+"), 1, consumername=consumer
            ):
                self.client.xgroup_delconsumer(self.stream, self.group, consumer)

        self._call(remove)

    def others(self) -> list[str]:
        """The names of the group's other consumers."""
        found: Any = self._call(lambda: self.client.xinfo_consumers(self.stream, self.group))
        return [name for c in found if (name := c["name"].decode()) != self.name]


@dataclass(frozen=True)
class Stale:
    """An entry without a heartbeat, and the consumer that has it."""

    id: bytes
    owner: str


def _without_silent_retries(client: redis.Redis) -> redis.Redis:
    """A client of the same server with separate connections, which raises on every lost connection."""
    pool = client.connection_pool
    settings = {**pool.connection_kwargs, "retry": Retry(NoBackoff(), retries=0)}
    return redis.Redis(
        connection_pool=redis.ConnectionPool(connection_class=pool.connection_class, **settings)
    )
