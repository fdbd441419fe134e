"""The Redis server of a run: reachable, writable, never evicting, large enough, and open to every service.

Permissions are tried, not read: a restricted user may rarely ask the server for its own rules. The commands
run on keys of a run that does not exist, which are deleted afterwards.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import redis
from redis.exceptions import NoPermissionError, ResponseError

from leeway.config import RunConfig
from leeway.errors import LeewayError
from leeway.findings import Finding, Level
from leeway.streams import ROLLOUTS_GROUP, TICKETS_GROUP, Keys, connect
from leeway.streams.client import replica_url
from leeway_host.preflight.site import Site
from leeway_host.preflight.sizes import MIB, keyframes_bytes, redis_bytes, show_size
from leeway_host.redis_server import find_server

CHECK = "redis"
CONNECT_S = 5.0
OLDEST = (6, 2)
CLOCK_S = 5.0
"""Difference to the server's clock above which times in its streams and its log mislead."""
Attempt = tuple[str, Callable[[redis.Redis, Keys], Any]]
LAUNCHER = "launcher"


def check_server(site: Site) -> list[Finding]:
    """Everything that does not need the size of the model."""
    settings = site.config.redis
    if settings.url is None:
        return [Finding("ok", CHECK, f"the run starts its own server: {find_server()}")]
    found, client = _connect(settings.url, "redis.url")
    if client is None:
        return found
    # Named like the run itself: a user may be restricted to runs of one name.
    keys = Keys(f"{site.config.name}-{time.strftime('%Y%m%d%H%M%S')}-preflight-{secrets.token_hex(4)}")
    with client:
        found += judge_info(read_info(client)) + judge_clock(client)
        try:
            found += try_commands(client, keys, [LAUNCHER, *_without_users(site.config)], "redis.url")
            for service, url in settings.service_urls.items():
                found += _check_user(service, url, keys)
        finally:
            _delete(client, keys)
    for place in settings.read_urls:
        found += check_replica(place, settings.service_urls.get("sampler", settings.url))
    return found


def _check_user(service: str, url: str, keys: Keys) -> list[Finding]:
    setting = f"redis.service_urls.{service}"
    found, client = _connect(url, setting)
    if client is None:
        return found
    with client:
        return try_commands(client, keys, [service], setting)


def check_server_memory(site: Site) -> list[Finding]:
    assert site.model is not None
    settings = site.config.redis
    if settings.url is None:
        return judge_memory(site.config, site.model.parameters, settings.maxmemory_mib * MIB, 0)
    found, client = _connect(settings.url, "redis.url")
    if client is None:
        return []  # check_server reports it
    with client:
        info = read_info(client)
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    return found + judge_memory(site.config, site.model.parameters, limit, used)


def _connect(url: str, setting: str) -> tuple[list[Finding], redis.Redis | None]:
    try:
        return [], connect(url, socket_timeout_s=CONNECT_S, wait_s=CONNECT_S, name="leeway:preflight")
    except LeewayError as exc:
        step = f"start that server, or correct {setting}"
        return [Finding("error", CHECK, f"{setting}: {exc}", step)], None


def _without_users(config: RunConfig) -> list[str]:
    """Services that use redis.url."""
    return [name for name in COMMANDS if name != LAUNCHER and name not in dict(config.redis.service_urls)]


def read_info(client: redis.Redis) -> dict[str, Any]:
    """INFO; empty when the user may not ask for it (which try_commands reports)."""
    try:
        found: Any = client.info()
    except redis.RedisError:
        return {}
    return dict(found)


def judge_info(info: Mapping[str, Any]) -> list[Finding]:
    """What INFO says about the version, the role, eviction and persistence."""
    if not info:
        return []
    found = []

    def add(level: Level, text: str, step: str = "") -> None:
        found.append(Finding(level, CHECK, text, step))

    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("valkey_version") or info.get("redis_version", "unknown"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers and numbers < OLDEST:
        add("error", f"{name} {version}: XAUTOCLAIM needs 6.2 or newer", "use a newer server")
    else:
        add("ok", f"{name} {version}")
    if info.get("role") in ("slave", "replica"):
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        add("error", f"the server is a read-only replica of {primary}", f"use {primary} as redis.url")
    if info.get("loading"):
        add("warning", "the server is still loading its data", "wait until it is done")
    if info.get("cluster_enabled"):
        add("warning", "the server is part of a Redis Cluster, which Leeway is not tested with", "")
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction" and int(info.get("maxmemory", 0)):
        step = "CONFIG SET maxmemory-policy noeviction"
        level: Level = "error" if policy.startswith("allkeys") else "warning"
        add(level, f"maxmemory-policy is {policy}: a full server deletes data of the run", step)
    elif policy != "noeviction":
        step = "CONFIG SET maxmemory-policy noeviction"
        add("warning", f"maxmemory-policy is {policy}, without effect while maxmemory is 0", step)
    if not int(info.get("aof_enabled", 0)):
        add("info", "no append-only file: if the server restarts, what is in flight is generated again")
    if (
        str(info.get("aof_last_write_status", "ok")) != "ok"
        or str(info.get("rdb_last_bgsave_status", "ok")) != "ok"
    ):
        add(
            "warning",
            "the server's last write to disk failed; it may reject writes (MISCONF)",
            "check its disk",
        )
    return found


def judge_memory(config: RunConfig, parameters: int, limit: int, used: int) -> list[Finding]:
    """`maxmemory` (0: none) against two versions of the weights and the responses in flight."""
    check, least = "redis memory", keyframes_bytes(config, parameters) / 2
    need = redis_bytes(config, parameters)
    own = config.redis.url is None
    setting = "redis.maxmemory_mib" if own else "maxmemory of the server"
    if not limit:
        return [Finding("info", check, f"{setting} is not set; the run needs about {show_size(need)}")]
    # weights.max_redis_mib defaults to what is free below maxmemory, minus a tenth.
    free = 0.9 * limit - used
    text = (
        f"about {show_size(need)} needed; {show_size(max(0, free))} usable of {setting}, {show_size(limit)}"
    )
    if free >= need:
        return [Finding("ok", check, text)]
    wanted = int((need + used) / 0.9 / MIB) + 1
    step = f"set redis.maxmemory_mib to {wanted}" if own else f"CONFIG SET maxmemory {wanted}mb"
    if free < least:
        return [Finding("error", check, f"not even one version of the weights fits: {text}", step)]
    return [Finding("warning", check, f"keyframes may not fit: {text}", step)]


def judge_clock(client: redis.Redis) -> list[Finding]:
    """The server's clock against this machine's, if the user may ask for it."""
    try:
        seconds, micros = client.time()
    except redis.RedisError:
        return []
    off = time.time() - (seconds + micros / 1e6)
    if abs(off) < CLOCK_S:
        return [Finding("ok", "clock", f"{abs(off):.1f} s from the Redis server's")]
    text = f"this machine's clock is {off:+.0f} s from the Redis server's"
    return [Finding("warning", "clock", text, "set both by NTP")]


def check_replica(place: str, url: str) -> list[Finding]:
    """A replica that samplers read weights from."""
    found, client = _connect(replica_url(place, url), f"redis.read_urls {place}")
    if client is None:
        return [
            Finding("warning", f.check, f.text, f"{f.next_step}; samplers read from redis.url") for f in found
        ]
    with client:
        info = read_info(client)
    if info and info.get("role") not in ("slave", "replica"):
        text = f"redis.read_urls: {place} is not a replica, and has no weights of this run"
        return [Finding("warning", CHECK, text, "make it a replica of redis.url, or omit it")]
    if info.get("master_link_status", "up") != "up":
        text = f"redis.read_urls: the replica {place} is not connected to its primary"
        return [Finding("warning", CHECK, text, "check replicaof and masterauth")]
    return [Finding("ok", CHECK, f"replica {place}")]


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
READER: list[Attempt] = [
    ("XREAD", lambda c, k: c.xread({k.weights: "0"}, count=1)),
    ("XRANGE", lambda c, k: c.xrange(k.weights, count=1)),
    ("XREVRANGE", lambda c, k: c.xrevrange(k.weights, count=1)),
    ("XLEN", lambda c, k: c.xlen(k.weight_chunks(1))),
]
COMMANDS: dict[str, list[Attempt]] = {
    LAUNCHER: [
        ("EXISTS", lambda c, k: c.exists(k.state)),
        ("HGETALL", lambda c, k: c.hgetall(k.samplers)),
        ("HSET", lambda c, k: c.hset(k.state, "preflight", "1")),
        ("XREAD", lambda c, k: c.xread({k.reports: "0"}, count=1)),
        ("XPENDING", lambda c, k: c.xpending(k.tickets, TICKETS_GROUP)),
        ("SCAN", lambda c, k: c.scan(match=f"{k.weights}:*", count=10)),
        ("UNLINK", lambda c, k: c.unlink(k.weights)),
    ],
    "controller": [
        ("HINCRBY", lambda c, k: c.hincrby(k.state, "preflight", 1)),
        ("WATCH, MULTI, EXEC", _write_state),
        ("XADD", lambda c, k: c.xadd(k.tickets, FIELDS)),
        ("XADD", lambda c, k: c.xadd(k.verdicts, FIELDS, maxlen=10)),
        ("XADD", lambda c, k: c.xadd(k.events, FIELDS, maxlen=10)),
        ("XGROUP CREATE", lambda c, k: c.xgroup_create(k.reports, "preflight", id="0", mkstream=True)),
        ("XGROUP CREATE", lambda c, k: c.xgroup_create(k.rollouts, ROLLOUTS_GROUP, id="0", mkstream=True)),
        ("XREADGROUP", lambda c, k: _read_group(k.reports, "preflight", c)),
        ("XACK", lambda c, k: c.xack(k.reports, "preflight", "0-1")),
        ("XTRIM", lambda c, k: c.xtrim(k.reports, minid="0-1", approximate=False)),
        ("HSET", lambda c, k: c.hset(k.checks, "preflight", "1")),
        ("HDEL", lambda c, k: c.hdel(k.fences, "preflight")),
        ("HGETALL", lambda c, k: c.hgetall(k.samplers)),
        ("XRANGE", lambda c, k: c.xrange(k.rollouts, count=1)),
    ],
    "trainer": [
        ("HINCRBY", lambda c, k: c.hincrby(k.state, "preflight", 1)),
        ("INFO", lambda c, k: c.info("memory")),
        ("XADD", lambda c, k: c.xadd(k.weight_chunks(1), FIELDS, id="1-0")),
        ("XADD", lambda c, k: c.xadd(k.weights, FIELDS)),
        ("XADD", lambda c, k: c.xadd(k.reports, FIELDS)),
        ("XADD", lambda c, k: c.xadd(k.events, FIELDS, maxlen=10)),
        ("XGROUP CREATE", lambda c, k: c.xgroup_create(k.rollouts, ROLLOUTS_GROUP, id="0", mkstream=True)),
        ("XREADGROUP", lambda c, k: _read_group(k.rollouts, ROLLOUTS_GROUP, c)),
        ("XAUTOCLAIM", lambda c, k: c.xautoclaim(k.rollouts, ROLLOUTS_GROUP, "preflight", 60_000)),
        ("XACK", lambda c, k: c.xack(k.rollouts, ROLLOUTS_GROUP, "0-1")),
        ("XDEL", lambda c, k: c.xdel(k.rollouts, "0-1")),
        ("XREAD", lambda c, k: c.xread({k.verdicts: "0"}, count=1)),
        ("SCAN", lambda c, k: c.scan(match=f"{k.weights}:*", count=10)),
        ("UNLINK", lambda c, k: c.unlink(k.weight_chunks(1))),
        *READER,
    ],
    "sampler": [
        *READER,
        ("XGROUP CREATE", lambda c, k: c.xgroup_create(k.tickets, TICKETS_GROUP, id="0", mkstream=True)),
        ("XREADGROUP", lambda c, k: _read_group(k.tickets, TICKETS_GROUP, c)),
        ("XAUTOCLAIM", lambda c, k: c.xautoclaim(k.tickets, TICKETS_GROUP, "preflight", 60_000)),
        ("XPENDING", lambda c, k: c.xpending_range(k.tickets, TICKETS_GROUP, "-", "+", 1)),
        ("XCLAIM", lambda c, k: c.xclaim(k.tickets, TICKETS_GROUP, "preflight", 60_000, ["0-1"])),
        ("XACK", lambda c, k: c.xack(k.tickets, TICKETS_GROUP, "0-1")),
        ("XDEL", lambda c, k: c.xdel(k.tickets, "0-1")),
        ("XADD", lambda c, k: c.xadd(k.rollouts, FIELDS)),
        ("XADD", lambda c, k: c.xadd(k.events, FIELDS, maxlen=10)),
        ("HSET", lambda c, k: c.hset(k.samplers, "preflight", "1")),
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
    except (redis.exceptions.ReadOnlyError, redis.exceptions.OutOfMemoryError) as exc:
        return str(exc)
    except ResponseError as exc:
        text = str(exc)
        if "unknown command" in text.lower() or text.startswith(("READONLY", "MISCONF", "OOM", "NOREPLICAS")):
            return text.split(", with args")[0]
    return None  # also NOGROUP and the like: the command is known and allowed


def _advice(problem: str) -> str:
    if problem == "no permission":
        return "give the user the rules that leeway redis acl prints"
    if "unknown command" in problem.lower():
        return "the server is too old, or the command was renamed or disabled"
    return "redis.url must be a primary that accepts writes"


def _delete(client: redis.Redis, keys: Keys) -> None:
    names = [
        keys.tickets, keys.rollouts, keys.weights, keys.reports, keys.verdicts, keys.events, keys.samplers,
        keys.fences, keys.state, keys.suspects, keys.checks, keys.weight_chunks(1),
    ]  # fmt: skip
    try:
        client.unlink(*names)
    except redis.RedisError:
        pass  # the launcher's user may not delete, which is among the findings
