"""The Redis server of a run: reachable, writable, never evicting, large enough, and open to every service."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

import redis

from leeway.config import RunConfig
from leeway.errors import LeewayError
from leeway.findings import Finding, Level
from leeway.streams import Keys, connect
from leeway.streams.client import replica_url
from leeway_host.preflight.permissions import CHECK, COMMANDS, LAUNCHER, delete_keys, names_of, try_commands
from leeway_host.preflight.site import Site
from leeway_host.preflight.sizes import MIB, keyframes_bytes, redis_bytes, show_size
from leeway_host.redis_server import find_server

CONNECT_S = 5.0
OLDEST = (6, 2)
CLOCK_S = 5.0
"""Difference to the server's clock above which times in its streams and its log mislead."""


def check_server(site: Site) -> list[Finding]:
    """Everything that does not need the size of the model."""
    settings = site.config.redis
    if settings.url is None:
        return [Finding("ok", CHECK, f"the run starts its own server: {find_server()}")]
    found, client = _connect(settings.url, "redis.url")
    if client is None:
        return found
    # Named like the run itself: a user may be restricted to runs of one name.
    prefix = f"{site.config.name}-{time.strftime('%Y%m%d%H%M%S')}-preflight-{secrets.token_hex(4)}"
    keys = Keys(prefix)
    with client:
        info = read_info(client)
        found += judge_info(info) + judge_clock(client)
        if "sentinel_masters" in info:
            return found
        try:
            found += try_commands(client, keys, [LAUNCHER, *_without_users(site.config)], "redis.url")
        finally:
            delete_keys(client, keys)
        for service, url in settings.service_urls.items():
            found += _check_user(service, url, Keys(f"{prefix}-{service}"), client)
    for place in settings.read_urls:
        found += check_replica(place, settings.service_urls.get("sampler", settings.url))
    return found


def _check_user(service: str, url: str, keys: Keys, launcher: redis.Redis) -> list[Finding]:
    """The commands of a service with its own user, on the server and database of redis.url."""
    setting = f"redis.service_urls.{service}"
    found, client = _connect(url, setting)
    if client is None:
        return found
    with client:
        try:
            found = try_commands(client, keys, [service], setting)
            if any(f.level == "error" for f in found) or _holds(launcher, keys):
                return found
        finally:
            delete_keys(launcher, keys)
            delete_keys(client, keys)
    text = f"{setting}: what it writes cannot be seen at redis.url: it is another server or database"
    return [Finding("error", CHECK, text, f"{setting} must differ from redis.url in user and password only")]


def _holds(client: redis.Redis, keys: Keys) -> bool:
    """True if one of `keys` is there, or cannot be asked for (which try_commands reports)."""
    try:
        return bool(client.exists(*names_of(keys)))
    except redis.RedisError:
        return True


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
    if "sentinel_masters" in info:
        step = "give the address of the primary: SENTINEL get-master-addr-by-name NAME tells it"
        add("error", "redis.url is a Sentinel, which holds no data", step)
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
