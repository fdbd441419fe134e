"""Reading a stream through a consumer group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

from leeway.streams.entries import Entry, block_ms, id_order, parse_entries
from leeway.streams.retry import LOST, retrying

log = logging.getLogger(__name__)

T = TypeVar("T")


class Consumer:
    """One consumer of a group on a stream.

    `read` returns each entry once; entries stay pending until `ack`. After a lost connection the next `read`
    first returns pending entries that it has not returned yet. All methods raise RedisUnavailable after
    `budget_s` seconds without the server.
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
        self._recover = True
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
            try:
                return call()
            except LOST:
                self._recover = True
                raise
            except ResponseError as exc:
                if "NOGROUP" not in str(exc):
                    raise
                log.warning("group %s on %s no longer exists; creating it again", self.group, self.stream)
                self.ensure()
                return call()

        return retrying(guarded, budget_s=self.budget_s, what=f"reading {self.stream}")

    def _read_from(self, start: str, count: int, block: int | None) -> list[Entry]:
        reply = self.client.xreadgroup(self.group, self.name, {self.stream: start}, count=count, block=block)
        return parse_entries(cast(Any, reply)[0][1], again=start != ">") if reply else []

    def read(self, count: int, block_s: float = 1.0) -> list[Entry]:
        """Up to `count` entries; waits at most `block_s` seconds for the first (0: does not wait)."""

        def read() -> list[Entry]:
            if self._recover:
                pending = self._read_from("0", 10_000, None)
                lost = [entry for entry in pending if entry.id not in self.held][:count]
                if lost:
                    return lost
                self._recover = False
            return self._read_from(">", count, block_ms(self.client, block_s) if block_s else None)

        entries = self._call(read)
        self.held.update(entry.id for entry in entries)
        return entries

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

    def deliveries(self, entries: Sequence[Entry]) -> dict[bytes, int]:
        """How often each of this consumer's pending `entries` was delivered, at least 1."""
        found = {entry.id: 1 for entry in entries}
        asked = sorted((entry.id for entry in entries if entry.again), key=id_order)
        if asked:
            pending: Any = self._call(
                lambda: self.client.xpending_range(
                    self.stream, self.group, asked[0], asked[-1], 10_000, consumername=self.name
                )
            )
            found.update((p["message_id"], p["times_delivered"]) for p in pending)
        return found

    def claim_stale(self, idle_s: float, count: int) -> list[Entry]:
        """Take over up to `count` entries that had no heartbeat for `idle_s` seconds."""
        reply = self._call(
            lambda: self.client.xautoclaim(
                self.stream, self.group, self.name, int(idle_s * 1000), start_id="0-0", count=count
            )
        )
        claimed = parse_entries(cast(Any, reply)[1], again=True)
        entries = [entry for entry in claimed if entry.id not in self.held]
        self.held.update(entry.id for entry in entries)
        return entries


def _without_silent_retries(client: redis.Redis) -> redis.Redis:
    """A client of the same server with separate connections, which raises on every lost connection."""
    pool = client.connection_pool
    settings = {**pool.connection_kwargs, "retry": Retry(NoBackoff(), retries=0)}
    return redis.Redis(
        connection_pool=redis.ConnectionPool(connection_class=pool.connection_class, **settings)
    )
