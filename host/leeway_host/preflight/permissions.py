"""The commands that each service sends to the server, and whether its user may send them.

Permissions are tried, not read: a restricted user may rarely ask the server for its own rules. The commands
run on keys of a run that does not exist, which are deleted afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import redis
from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

from leeway.findings import Finding
from leeway.streams import ROLLOUTS_GROUP, TICKETS_GROUP, Keys

CHECK = "redis"
CLUSTER = (MovedError, AskError, ClusterDownError, ClusterCrossSlotError, TryAgainError)
CLUSTERED = "the cluster keeps this key elsewhere, or nowhere"
Attempt = tuple[str, Callable[[redis.Redis, Keys], Any]]
LAUNCHER = "launcher"


def _write_state(client: redis.Redis, keys: Keys) -> None:
    pipe = client.pipeline(transaction=True)
    cast(Any, pipe).watch(keys.state)
    pipe.multi()
    pipe.hset(keys.state, "preflight", "1")
    pipe.execute()


def _read_group(stream: str, group: str, client: redis.Redis) -> None:
    client.xreadgroup(group, "preflight", {stream: ">"}, count=1)


STREAM: dict[str, str] = {"x": "1"}
FIELDS: Any = STREAM
TIME: Attempt = ("TIME", lambda c, k: c.time())
READER: list[Attempt] = [
    TIME,
    ("XRANGE", lambda c, k: c.xrange(k.weights, count=1)),
    ("XLEN", lambda c, k: c.xlen(k.weight_chunks(0, 1))),
]
COMMANDS: dict[str, list[Attempt]] = {
    LAUNCHER: [
        TIME,
        ("EXISTS", lambda c, k: c.exists(k.state)),
        ("HGETALL", lambda c, k: c.hgetall(k.checks)),
        ("SMEMBERS", lambda c, k: c.smembers(k.samplers)),
        ("MGET", lambda c, k: c.mget(k.sampler("preflight"))),
        ("HSET", lambda c, k: c.hset(k.requests, "preflight", "1")),
        ("XREAD", lambda c, k: c.xread({k.reports: "0"}, count=1)),
        ("XPENDING", lambda c, k: c.xpending(k.tickets, TICKETS_GROUP)),
        ("SCAN", lambda c, k: c.scan(match=f"{k.weights}:*", count=10)),
        ("UNLINK", lambda c, k: c.unlink(k.weights)),
    ],
    "controller": [
        TIME,
        ("HINCRBY", lambda c, k: c.hincrby(k.state, "preflight", 1)),
        ("WATCH, MULTI, EXEC", _write_state),
        ("XADD", lambda c, k: c.xadd(k.tickets, FIELDS)),
        ("XADD", lambda c, k: c.xadd(k.verdicts, FIELDS, maxlen=10)),
        ("XADD", lambda c, k: c.xadd(k.events, FIELDS, maxlen=10)),
        ("XGROUP CREATE", lambda c, k: c.xgroup_create(k.reports, "preflight", id="0", mkstream=True)),
        ("XGROUP CREATE", lambda c, k: c.xgroup_create(k.rollouts, ROLLOUTS_GROUP, id="0", mkstream=True)),
        ("XREADGROUP", lambda c, k: _read_group(k.reports, "preflight", c)),
        ("XPENDING", lambda c, k: c.xpending_range(k.reports, "preflight", "-", "+", 1)),
        ("XAUTOCLAIM", lambda c, k: c.xautoclaim(k.reports, "preflight", "preflight", 60_000)),
        ("XACK", lambda c, k: c.xack(k.reports, "preflight", "0-1")),
        ("XTRIM", lambda c, k: c.xtrim(k.reports, minid="0-1", approximate=False)),
        ("HSET", lambda c, k: c.hset(k.checks, "preflight", "1")),
        ("HDEL", lambda c, k: c.hdel(k.fences, "preflight")),
        ("HDEL", lambda c, k: c.hdel(k.requests, "preflight")),
        ("SREM", lambda c, k: c.srem(k.samplers, "preflight")),
        ("MGET", lambda c, k: c.mget(k.sampler("preflight"))),
        ("DEL", lambda c, k: c.delete(k.sampler("preflight"))),
        ("XREAD", lambda c, k: c.xread({k.rollouts: "0"}, count=1)),
    ],
    "trainer": [
        ("HINCRBY", lambda c, k: c.hincrby(k.state, "preflight", 1)),
        ("INFO", lambda c, k: c.info("memory")),
        ("XADD", lambda c, k: c.xadd(k.weight_chunks(0, 1), FIELDS, id="1-0")),
        ("XADD", lambda c, k: c.xadd(k.weights, FIELDS)),
        ("XADD", lambda c, k: c.xadd(k.reports, FIELDS)),
        ("XADD", lambda c, k: c.xadd(k.events, FIELDS, maxlen=10)),
        ("XGROUP CREATE", lambda c, k: c.xgroup_create(k.rollouts, ROLLOUTS_GROUP, id="0", mkstream=True)),
        ("XREADGROUP", lambda c, k: _read_group(k.rollouts, ROLLOUTS_GROUP, c)),
        ("XPENDING", lambda c, k: c.xpending_range(k.rollouts, ROLLOUTS_GROUP, "-", "+", 1)),
        ("XCLAIM", lambda c, k: c.xclaim(k.rollouts, ROLLOUTS_GROUP, "preflight", 60_000, ["0-1"])),
        ("XACK", lambda c, k: c.xack(k.rollouts, ROLLOUTS_GROUP, "0-1")),
        ("XDEL", lambda c, k: c.xdel(k.rollouts, "0-1")),
        ("XREAD", lambda c, k: c.xread({k.verdicts: "0"}, count=1)),
        ("XINFO STREAM", lambda c, k: c.xinfo_stream(k.rollouts)),
        ("XADD", lambda c, k: c.xadd(k.rejected, FIELDS, maxlen=10)),
        ("SADD", lambda c, k: c.sadd(k.weight_streams, "preflight")),
        ("SMEMBERS", lambda c, k: c.smembers(k.samplers)),
        ("MGET", lambda c, k: c.mget(k.sampler("preflight"))),
        ("UNLINK", lambda c, k: c.unlink(k.weight_chunks(0, 1))),
        *READER,
    ],
    "sampler": [
        *READER,
        ("XREAD", lambda c, k: c.xread({k.weights: "0"}, count=1)),
        ("XGROUP CREATE", lambda c, k: c.xgroup_create(k.tickets, TICKETS_GROUP, id="0", mkstream=True)),
        ("XREADGROUP", lambda c, k: _read_group(k.tickets, TICKETS_GROUP, c)),
        ("XAUTOCLAIM", lambda c, k: c.xautoclaim(k.tickets, TICKETS_GROUP, "preflight", 60_000)),
        ("XPENDING", lambda c, k: c.xpending_range(k.tickets, TICKETS_GROUP, "-", "+", 1)),
        ("XCLAIM", lambda c, k: c.xclaim(k.tickets, TICKETS_GROUP, "preflight", 60_000, ["0-1"])),
        ("XACK", lambda c, k: c.xack(k.tickets, TICKETS_GROUP, "0-1")),
        ("XDEL", lambda c, k: c.xdel(k.tickets, "0-1")),
        ("XADD", lambda c, k: c.xadd(k.rollouts, FIELDS)),
        ("XADD", lambda c, k: c.xadd(k.events, FIELDS, maxlen=10)),
        ("SET", lambda c, k: c.set(k.sampler("preflight"), "1")),
        ("SADD", lambda c, k: c.sadd(k.samplers, "preflight")),
        ("HSETNX", lambda c, k: c.hsetnx(k.suspects, "preflight", "1")),
        ("HDEL", lambda c, k: c.hdel(k.suspects, "preflight")),
        ("HGET", lambda c, k: c.hget(k.fences, "preflight")),
        ("GET", lambda c, k: c.get(k.probe)),
    ],
}
"""What each service asks of the server, on the keys it uses (docs/architecture.md)."""


def try_commands(client: redis.Redis, keys: Keys, services: list[str], setting: str) -> list[Finding]:
    """Carry out the commands of `services` on `keys`, which belong to no run."""
    refused: dict[str, list[str]] = {}
    try:
        for service in services:
            for name, attempt in COMMANDS[service]:
                problem = _try(client, keys, attempt)
                if problem:
                    refused.setdefault(problem, []).append(f"{name} ({service})")
    except redis.RedisError as exc:
        return [
            Finding("error", CHECK, f"{setting}: the connection was lost: {exc}", "check the server's log")
        ]
    if not refused:
        return [Finding("ok", CHECK, f"{setting}: all commands of {', '.join(services)} are allowed")]
    return [
        Finding("error", CHECK, f"{setting}: {', '.join(dict.fromkeys(names))}: {problem}", _advice(problem))
        for problem, names in refused.items()
    ]


def _try(client: redis.Redis, keys: Keys, attempt: Callable[[redis.Redis, Keys], Any]) -> str | None:
    """Why the server refuses a command; None if it would carry it out."""
    try:
        attempt(client, keys)
    except NoPermissionError:
        return "no permission"
    except CLUSTER as exc:
        return f"{CLUSTERED} ({type(exc).__name__}: {_bare(exc)})"
    except (ReadOnlyError, OutOfMemoryError) as exc:
        return _bare(exc)
    except redis.WatchError as exc:
        return str(exc)  # nobody else writes these keys: a read-only server ended the transaction
    except ResponseError as exc:
        text = _bare(exc)
        if "unknown command" in text.lower() or text.startswith(("READONLY", "MISCONF", "OOM", "NOREPLICAS")):
            return text.split(", with args")[0]
    return None  # also NOGROUP and the like: the command is known and allowed


def _bare(error: Exception) -> str:
    """The server's own words; in a transaction, redis-py puts the command before them."""
    return str(error).partition("of pipeline caused error: ")[2] or str(error)


def _advice(problem: str) -> str:
    if problem.startswith(CLUSTERED):
        return "use a server outside a cluster: the streams of a run must be on one server"
    if "maxmemory" in problem:
        return "the server is full: raise its maxmemory, or delete what is in it"
    if problem == "no permission":
        return "give the user the rules that leeway redis acl prints"
    if "unknown command" in problem.lower():
        return "the server is too old, or the command was renamed or disabled"
    return "redis.url must be a primary that accepts writes"


def names_of(keys: Keys) -> list[str]:
    """Every key that `try_commands` may create."""
    return [
        keys.tickets, keys.rollouts, keys.weights, keys.reports, keys.verdicts, keys.events, keys.samplers,
        keys.fences, keys.state, keys.suspects, keys.checks, keys.weight_chunks(0, 1), keys.requests,
        keys.rejected, keys.weight_streams, keys.sampler("preflight"),
    ]  # fmt: skip


def delete_keys(client: redis.Redis, keys: Keys) -> None:
    try:
        client.unlink(*names_of(keys))
    except redis.RedisError:
        pass  # the launcher's user may not delete, which is among the findings
