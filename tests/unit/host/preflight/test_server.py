"""A real server with every kind of problem: policy, memory, role, version, users."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from preflight_support import config_of, facts, levels, site_of, text_of

from leeway.streams import Keys
from leeway_host.acl import SERVICES, setuser_arguments
from leeway_host.preflight.server import check_server, check_server_memory, judge_info, judge_memory
from leeway_host.preflight.sizes import GIB, MIB
from leeway_host.redis_server import EmbeddedRedis, free_port

Client = redis.Redis
GOOD_INFO: dict[str, Any] = {"valkey_version": "8.1.0", "role": "master", "maxmemory": GIB, "aof_enabled": 1}


def check(tmp_path: Path, url: str, **settings: Any) -> list[Any]:
    return check_server(site_of(tmp_path, config_of(redis={"url": url, **settings})))


def test_a_good_server_has_no_problem_and_nothing_is_left(
    redis_server: EmbeddedRedis, client: Client, tmp_path: Path
) -> None:
    found = check(tmp_path, redis_server.url)
    assert levels(found) == {"ok", "info"}, text_of(found)
    assert "all commands of launcher, controller, trainer, sampler are allowed" in text_of(found)
    assert client.keys("*") == []


def test_the_runs_own_server(tmp_path: Path) -> None:
    (found,) = check_server(site_of(tmp_path))
    assert found.level == "ok" and "its own server" in found.text


@pytest.fixture
def user(redis_server: EmbeddedRedis, client: Client) -> Iterator[Any]:
    """user(*rules) -> URL of a user with those rules."""
    names = []

    def make(*rules: str) -> str:
        name = f"t-preflight-{len(names)}"
        names.append(name)
        client.execute_command("ACL", "SETUSER", name, "reset", "on", ">pw", *rules)
        return f"redis://{name}:pw@127.0.0.1:{redis_server.port}/0"

    yield make
    for name in names:
        client.acl_deluser(name)


@pytest.mark.parametrize(
    ("rules", "parts"),
    [
        (("~*", "+@all", "-xautoclaim"), ["XAUTOCLAIM (controller), XAUTOCLAIM (sampler): no permission"]),
        (("~*", "+@all", "-unlink"), ["UNLINK (launcher)", "leeway redis acl"]),
        (("~*", "+@all", "-@transaction"), ["WATCH, MULTI, EXEC (controller)"]),
        (("~*", "+@all", "-hsetnx", "-xtrim"), ["HSETNX (sampler)", "XTRIM (controller)"]),
        (("~other:*", "+@all"), ["EXISTS (launcher)", "XADD (trainer)"]),
        (("%R~*", "+@all"), ["HSET (launcher)"]),
    ],
)
def test_a_user_that_may_not(
    user: Any, client: Client, tmp_path: Path, rules: tuple[str, ...], parts: list[str]
) -> None:
    found = check(tmp_path, user(*rules))
    assert "error" in levels(found)
    assert all(part in text_of(found) for part in parts), text_of(found)


def test_the_users_of_leeway_redis_acl_may_do_their_work(
    redis_server: EmbeddedRedis, client: Client, user: Any, tmp_path: Path
) -> None:
    urls = {service: user(*setuser_arguments(service, "pw")) for service in SERVICES}
    found = check(tmp_path, redis_server.url, service_urls=urls)
    assert "error" not in levels(found), text_of(found)
    assert "redis.service_urls.sampler: all commands of sampler are allowed" in text_of(found)
    assert client.keys("*") == []


def test_swapped_users_are_noticed(redis_server: EmbeddedRedis, user: Any, tmp_path: Path) -> None:
    urls = {
        "trainer": user(*setuser_arguments("sampler", "pw")),
        "sampler": user(*setuser_arguments("trainer", "pw")),
    }
    found = text_of(check(tmp_path, redis_server.url, service_urls=urls))
    assert "redis.service_urls.trainer: HINCRBY (trainer)" in found
    assert (
        "redis.service_urls.sampler: XREAD (sampler), XGROUP CREATE (sampler), XREADGROUP (sampler)" in found
    )


def test_a_wrong_password_and_a_server_that_is_not_there(
    redis_server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leeway_host.preflight.server.CONNECT_S", 0.5)
    (found,) = check(tmp_path, f"redis://:wrong@127.0.0.1:{redis_server.port}/0")
    assert found.level == "error" and "refused" in found.text and "wrong" not in found.text
    (found,) = check(tmp_path, "redis://127.0.0.1:1/0")
    assert found.level == "error" and "redis.url" in found.text and "start that server" in found.next_step


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/99", "the number after the port is the database"),
        ("/0", "it expects a password: redis://:password@"),
    ],
)
def test_what_a_refusal_means(redis_server: EmbeddedRedis, tmp_path: Path, path: str, words: str) -> None:
    user = f":{redis_server.password}@" if path != "/0" else ""
    (found,) = check(tmp_path, f"redis://{user}127.0.0.1:{redis_server.port}{path}")
    assert found.level == "error" and words in found.text


@pytest.mark.parametrize(
    ("scheme", "answer", "words"),
    [
        ("redis", b"<html>", "does not speak Redis"),
        ("redis", b"", "then the address begins with rediss://"),
        ("rediss", None, "without it, the address begins with redis://"),
    ],
    ids=["web server", "server that hangs up", "server that is silent"],
)
def test_a_server_that_is_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, answer: bytes | None, words: str
) -> None:
    monkeypatch.setattr("leeway_host.preflight.server.CONNECT_S", 0.3)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if answer is None:
                time.sleep(2)
            elif answer:
                self.request.recv(1024)
                self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (found,) = check(tmp_path, f"{scheme}://127.0.0.1:{server.server_address[1]}/0")
        server.shutdown()
    assert found.level == "error" and words in found.text, found


def test_a_service_on_another_database(redis_server: EmbeddedRedis, client: Client, tmp_path: Path) -> None:
    other = redis_server.url.removesuffix("/0") + "/1"
    found = check(tmp_path, redis_server.url, service_urls={"trainer": other, "sampler": redis_server.url})
    errors = [f for f in found if f.level == "error"]
    assert "redis.service_urls.trainer: what it writes cannot be seen" in text_of(errors) and len(errors) == 1
    client.execute_command("SELECT", 1)
    assert client.keys("*") == []


class Cluster(EmbeddedRedis):
    """A node of a cluster that owns no slot."""

    def _config(self) -> bytes:
        return super()._config() + b"cluster-enabled yes\n"


def test_a_node_of_a_cluster_without_the_keys(tmp_path: Path) -> None:
    # The port of the cluster's bus is 10,000 above.
    port = next(port for port in iter(free_port, None) if port < 55_000)
    with Cluster(maxmemory_mib=64, port=port) as node:
        found = text_of(check(tmp_path, node.url))
    assert "HSET (launcher)" in found and "XADD (sampler)" in found and "CLUSTERDOWN" in found.upper()
    assert "use a server outside a cluster" in found


def test_a_policy_that_evicts(redis_server: EmbeddedRedis, client: Client, tmp_path: Path) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        found = [f for f in check(tmp_path, redis_server.url) if f.level == "error"]
    finally:
        client.config_set("maxmemory-policy", "noeviction")
    assert "maxmemory-policy is allkeys-lru" in text_of(found)
    assert "CONFIG SET maxmemory-policy noeviction" in text_of(found)


def test_a_full_server(redis_server: EmbeddedRedis, client: Client, tmp_path: Path) -> None:
    client.config_set("maxmemory", "1mb")
    try:
        site = site_of(tmp_path, config_of(redis={"url": redis_server.url}))
        found = check_server(site)
        memory = check_server_memory(replace(site, model=facts(1_000_000)))
    finally:
        client.config_set("maxmemory", "1024mb")
    assert "OOM" in text_of(found) or "command not allowed" in text_of(found), text_of(found)
    assert "the server is full" in text_of(found) and "of pipeline" not in text_of(found)
    assert memory[0].level == "error" and "not even one version" in memory[0].text


def test_a_replica(tmp_path: Path) -> None:
    with EmbeddedRedis(maxmemory_mib=64) as primary, EmbeddedRedis(replica_of=primary) as replica:
        found = text_of(check(tmp_path, replica.url))
        reader = text_of(check(tmp_path, primary.url, read_urls=[f"redis://127.0.0.1:{replica.port}"]))
        wrong = text_of(check(tmp_path, primary.url, read_urls=[f"redis://127.0.0.1:{primary.port}"]))
    assert f"read-only replica of 127.0.0.1:{primary.port}" in found
    assert "error redis: redis.url" in found and "read only" in found.lower()
    assert f"replica redis://127.0.0.1:{replica.port}" in reader and "error" not in reader
    assert "is not a replica" in wrong


@pytest.mark.parametrize(
    ("change", "level", "part"),
    [
        ({"valkey_version": None, "redis_version": "6.0.16"}, "error", "Redis 6.0.16: XAUTOCLAIM needs 6.2"),
        ({"role": "slave", "master_host": "h", "master_port": 1}, "error", "replica of h:1"),
        ({"sentinel_masters": 1}, "error", "is a Sentinel"),
        ({"loading": 1}, "warning", "loading"),
        ({"cluster_enabled": 1}, "warning", "Cluster"),
        ({"maxmemory_policy": "allkeys-lru"}, "error", "allkeys-lru"),
        ({"maxmemory_policy": "volatile-lru"}, "warning", "volatile-lru"),
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": 0}, "warning", "without effect"),
        ({"aof_enabled": 0}, "info", "append-only"),
        ({"aof_last_write_status": "err"}, "warning", "write to disk failed"),
        ({"rdb_last_bgsave_status": "err"}, "warning", "write to disk failed"),
        ({}, "ok", "Valkey 8.1.0"),
    ],
)
def test_what_info_says(change: dict[str, Any], level: str, part: str) -> None:
    info = {key: value for key, value in {**GOOD_INFO, **change}.items() if value is not None}
    found = judge_info(info)
    assert any(f.level == level and part in f.text for f in found), text_of(found)
    assert levels(found) <= {level, "ok"}


@pytest.mark.parametrize(
    ("limit", "used", "level"),
    [
        (0, 0, "info"),
        (GIB, 0, "ok"),
        (300 * MIB, 0, "warning"),
        (100 * MIB, 0, "error"),
        (GIB, 900 * MIB, "error"),
    ],
)
def test_memory_for_two_versions(limit: int, used: int, level: str) -> None:
    """100 M parameters in bfloat16: a version has 191 MiB."""
    config = config_of(redis={"url": "redis://host:1/0"})
    (found,) = judge_memory(config, 100_000_000, limit, used)
    assert found.level == level, found.text
    assert level == "ok" or "MiB" in found.text


def test_memory_of_the_runs_own_server(tmp_path: Path) -> None:
    config = config_of(redis={"maxmemory_mib": 64})
    site = replace(site_of(tmp_path, config), model=facts(100_000_000))
    (found,) = check_server_memory(site)
    assert found.level == "error" and "set redis.maxmemory_mib to" in found.next_step
    wanted = int(found.next_step.split()[-1])
    enough = replace(site, config=config_of(redis={"maxmemory_mib": wanted}))
    assert check_server_memory(enough)[0].level == "ok"


def test_weights_on_another_way_need_no_memory() -> None:
    config = config_of(weights={"transport": "nccl"})
    assert judge_memory(config, 10**9, 64 * MIB, 0)[0].level == "ok"


def test_the_keys_of_all_attempts_are_deleted(
    client: Client, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    keys = Keys("bystander")
    client.set(keys.probe, "1")
    check(tmp_path, redis_server.url)
    assert client.keys("*") == [keys.probe.encode()]
