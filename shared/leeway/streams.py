"""Redis streams as Leeway uses them: the one adapter that every service shares.

    Consumer   reads a stream through a consumer group; acknowledges after the effect
    Tail       reads a stream on its own, from a position; fan-out, no group
    append     writes an entry, waits when the server is away or out of memory, within a budget

All of it survives a lost connection: a read whose answer was lost is found again among the consumer's own
pending entries, a write is repeated and its reader collapses duplicates on the message's identity.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ResponseError,
)
from redis.retry import Retry
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential

from leeway.config.load import redact_url
from leeway.errors import LeewayError, UsageError
from leeway.messages import AnyMessage, Fields, encode

log = logging.getLogger(__name__)

TICKETS_GROUP = "samplers"
ROLLOUTS_GROUP = "trainer"
REPORTS_GROUP = "controller"
MANUAL_FIELD = "manual_resync"
"""Field of the hash `state` that asks for a resync; the controller removes it with its verdict."""
KEYFRAME_FIELD = "manual_keyframe"
"""Field of the hash `state` that asks for the next version in full; the trainer removes it."""
SCALE_FIELD = "samplers_wanted"
"""Field of the hash `state` that tells the local launcher how many samplers to run."""
EPOCH_FIELD = "epoch"
"""Field of the hash `state` that counts the starts of the trainer; the newest start owns the run."""
LOST = (redis.ConnectionError, redis.TimeoutError)
T = TypeVar("T")


class RedisUnavailable(LeewayError):
    """The server did not answer within the budget."""


class RedisRefused(UsageError):
    """The server answered and refused: wrong password, missing permission, or not a Redis at all."""


@dataclass(frozen=True)
class Keys:
    """Names of a run's streams and keys; the braces make all of them one Redis Cluster slot."""

    run: str

    def key(self, name: str) -> str:
        return f"leeway:{{{self.run}}}:{name}"

    @property
    def tickets(self) -> str:
        return self.key("tickets")

    @property
    def rollouts(self) -> str:
        return self.key("rollouts")

    @property
    def weights(self) -> str:
        return self.key("weights")

    @property
    def reports(self) -> str:
        return self.key("reports")

    @property
    def verdicts(self) -> str:
        return self.key("verdicts")

    @property
    def events(self) -> str:
        return self.key("events")

    @property
    def samplers(self) -> str:
        return self.key("samplers")

    @property
    def fences(self) -> str:
        return self.key("fences")

    @property
    def state(self) -> str:
        return self.key("state")

    @property
    def suspects(self) -> str:
        """Tickets that were begun alone, see leeway_sampler.suspects."""
        return self.key("suspects")

    @property
    def probe(self) -> str:
        """Counts requests for a probe of every sampler's distribution."""
        return self.key("probe")

    @property
    def checks(self) -> str:
        return self.key("checks")

    def weight_chunks(self, version: int) -> str:
        return self.key(f"weights:{version}")


def connect(
    url: str, *, socket_timeout_s: float = 5.0, wait_s: float = 10.0, name: str | None = None
) -> redis.Redis:
    """A client that answered a PING. `name` is what the server's CLIENT LIST shows (see `client_name`).

    Raises RedisRefused (wrong password, no permission, bad URL, a certificate that nobody vouches for) at
    once and RedisUnavailable after `wait_s`.
    """
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=socket_timeout_s,
            health_check_interval=15,
            client_name=name,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=1),
        )
    except ValueError as exc:
        raise RedisRefused(
            f"redis.url {redact_url(url)}: {exc}; expected redis://:password@host:port/0"
        ) from exc
    try:
        retrying(client.ping, budget_s=wait_s, what=f"connecting to {redact_url(url)}")
    except (AuthenticationError, NoPermissionError, ResponseError) as exc:
        client.close()
        raise RedisRefused(f"Redis at {redact_url(url)} refused: {exc}; check the user and password") from exc
    except redis.ConnectionError as exc:
        client.close()
        raise RedisRefused(
            f"Redis at {redact_url(url)}: {exc}; name the certificate of its authority in the environment "
            "variable SSL_CERT_FILE"
        ) from exc
    except RedisUnavailable:
        client.close()
        raise
    return client


def client_name(run: str, service: str) -> str:
    """The name of a service's connections on the server."""
    return f"leeway:{run}:{service}"


def replica_url(place: str, url: str) -> str:
    """`place` (redis://host:port) with scheme options, user, password and database of the server `url`."""
    credentials, _, _ = urlsplit(url).netloc.rpartition("@")
    parts = urlsplit(place)
    netloc = f"{credentials}@{parts.netloc}" if credentials else parts.netloc
    return parts._replace(netloc=netloc, path=urlsplit(url).path).geturl()


def _passes_by_itself(error: BaseException) -> bool:
    # A refused password or certificate is a ConnectionError in redis-py, but no wait will mend it.
    if isinstance(error, AuthenticationError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
        return False
    return isinstance(error, (*LOST, OutOfMemoryError))


def retrying(call: Callable[[], T], *, budget_s: float, what: str) -> T:
    """`call()` repeated while the server is away, loading or out of memory.

    Raises RedisUnavailable after `budget_s` seconds, naming `what`. Other errors pass.
    """

    def give_up(state: RetryCallState) -> T:
        error = state.outcome.exception() if state.outcome else None
        raise RedisUnavailable(f"{what}: no success within {budget_s:g} s: {error}") from error

    def note(state: RetryCallState) -> None:
        if state.attempt_number in (2, 10, 100):
            log.warning("%s: %s; trying again", what, state.outcome.exception() if state.outcome else "")

    retry = Retrying(
        retry=retry_if_exception(_passes_by_itself),
        wait=wait_exponential(multiplier=0.05, max=1.0),
        stop=stop_after_delay(budget_s),
        before_sleep=note,
        retry_error_callback=cast(Any, give_up),
    )
    return retry(call)


def append(
    client: redis.Redis,
    stream: str,
    message: AnyMessage,
    *,
    maxlen: int | None = None,
    budget_s: float = 60.0,
) -> bytes:
    """Write one entry and return its id. Waits up to `budget_s` while the server is away or full."""
    fields = encode(message)
    return retrying(
        lambda: add_fields(client, stream, fields, maxlen), budget_s=budget_s, what=f"writing to {stream}"
    )


def add_fields(client: Any, stream: str, fields: Fields, maxlen: int | None = None) -> bytes:
    """One XADD on a client or pipeline; `maxlen` caps the stream (only for `events`)."""
    return cast(bytes, client.xadd(stream, cast(Any, fields), maxlen=maxlen, approximate=maxlen is not None))


@dataclass(frozen=True)
class Entry:
    """One stream entry as read. `again`: it was handed to a consumer before."""

    id: bytes
    fields: Fields
    again: bool = False


def _entries(raw: Iterable[tuple[bytes, Fields | None]], again: bool = False) -> list[Entry]:
    # An entry that was deleted while pending comes back without fields.
    return [Entry(entry_id, dict(fields), again) for entry_id, fields in raw if fields]


def _id_order(entry_id: bytes) -> tuple[int, int]:
    """Sorting key of entry ids, `<milliseconds>-<number>`."""
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)


def _block_ms(client: redis.Redis, block_s: float) -> int:
    # A blocking read must end before the socket times out, or its entries hang on a dead connection.
    limit = client.connection_pool.connection_kwargs.get("socket_timeout") or 5.0
    return max(1, int(1000 * min(block_s, limit / 2)))


def _without_silent_retries(client: redis.Redis) -> redis.Redis:
    """A client of the same server, with connections of its own, that tells of every lost connection."""
    pool = client.connection_pool
    settings = {**pool.connection_kwargs, "retry": Retry(NoBackoff(), retries=0)}
    return redis.Redis(
        connection_pool=redis.ConnectionPool(connection_class=pool.connection_class, **settings)
    )


class Consumer:
    """One consumer of a group on a stream.

    `read` gives each entry once per consumer; entries stay pending until `ack`. After a lost connection the
    next `read` first returns pending entries that this object never handed out.
    """

    def __init__(
        self, client: redis.Redis, stream: str, group: str, name: str, *, budget_s: float = 60.0
    ) -> None:
        # redis-py would repeat a read whose reply was lost on the way, and what that reply held would stay
        # pending here, unseen.
        self.client = _without_silent_retries(client)
        self.stream, self.group, self.name = stream, group, name
        self.budget_s = budget_s
        self.held: set[bytes] = set()
        self._recover = True
        self.ensure()

    def ensure(self) -> None:
        """Create stream and group when missing; the group starts at the stream's beginning."""

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
                log.warning("group %s on %s was gone and is created again", self.group, self.stream)
                self.ensure()
                return call()

        return retrying(guarded, budget_s=self.budget_s, what=f"reading {self.stream}")

    def _read_from(self, start: str, count: int, block_ms: int | None) -> list[Entry]:
        reply = self.client.xreadgroup(
            self.group, self.name, {self.stream: start}, count=count, block=block_ms
        )
        return _entries(cast(Any, reply)[0][1], again=start != ">") if reply else []

    def read(self, count: int, block_s: float = 1.0) -> list[Entry]:
        """Up to `count` entries, waiting at most `block_s` for the first (0: not at all)."""

        def read() -> list[Entry]:
            if self._recover:
                pending = self._read_from("0", 10_000, None)
                lost = [entry for entry in pending if entry.id not in self.held][:count]
                if lost:
                    return lost
                self._recover = False
            return self._read_from(">", count, _block_ms(self.client, block_s) if block_s else None)

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
        """Put the acknowledgement into a MULTI of the caller; call `forget` once it was executed."""
        pipe.xack(self.stream, self.group, *ids)
        if delete:
            pipe.xdel(self.stream, *ids)

    def forget(self, ids: Iterable[bytes]) -> None:
        """These entries are no longer held by this consumer."""
        self.held.difference_update(ids)

    def refresh(self, ids: Sequence[bytes]) -> None:
        """Heartbeat: the entries are being worked on (idle time 0, delivery count unchanged)."""
        if ids:
            self._call(
                lambda: self.client.xclaim(
                    self.stream, self.group, self.name, 0, cast(Any, list(ids)), justid=True
                )
            )

    def deliveries(self, entries: Sequence[Entry]) -> dict[bytes, int]:
        """How often each of this consumer's pending `entries` was handed to a consumer, 1 at first."""
        found = {entry.id: 1 for entry in entries}
        asked = sorted((entry.id for entry in entries if entry.again), key=_id_order)
        if asked:
            pending: Any = self._call(
                lambda: self.client.xpending_range(
                    self.stream, self.group, asked[0], asked[-1], 10_000, consumername=self.name
                )
            )
            found.update((p["message_id"], p["times_delivered"]) for p in pending)
        return found

    def claim_stale(self, idle_s: float, count: int) -> list[Entry]:
        """Take over entries of consumers that gave no heartbeat for `idle_s` seconds."""
        reply = self._call(
            lambda: self.client.xautoclaim(
                self.stream, self.group, self.name, int(idle_s * 1000), start_id="0-0", count=count
            )
        )
        entries = [entry for entry in _entries(cast(Any, reply)[1], again=True) if entry.id not in self.held]
        self.held.update(entry.id for entry in entries)
        return entries


class Tail:
    """Reads a stream from a position on, without a group. `last_id` is the newest entry seen."""

    def __init__(
        self, client: redis.Redis, stream: str, last_id: bytes | str = "0", *, budget_s: float = 60.0
    ) -> None:
        self.client, self.stream, self.last_id, self.budget_s = client, stream, last_id, budget_s

    def read(self, count: int = 100, block_s: float | None = 1.0) -> list[Entry]:
        """Entries after `last_id`, at most `count`; waits up to `block_s` (None: not at all)."""
        block = None if block_s is None else _block_ms(self.client, block_s)
        reply = retrying(
            lambda: self.client.xread({self.stream: self.last_id}, count=count, block=block),
            budget_s=self.budget_s,
            what=f"reading {self.stream}",
        )
        entries = _entries(cast(Any, reply)[0][1]) if reply else []
        if entries:
            self.last_id = entries[-1].id
        return entries


def now() -> float:
    """Unix time in seconds, for heartbeats."""
    return time.time()
