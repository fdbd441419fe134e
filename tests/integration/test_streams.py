"""The stream adapter against a real server."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from leeway.messages import Event, EventHeader, decode
from leeway.streams import (
    TICKETS_GROUP,
    Consumer,
    Keys,
    RedisRefused,
    RedisUnavailable,
    Tail,
    append,
    connect,
    remove_idle_consumers,
    retrying,
)
from leeway.streams.consumer import PAGE
from leeway_host.redis_server import EmbeddedRedis


def event(text: str) -> Event:
    return Event(EventHeader(source="test", name="x", text=text))


def texts(entries: list) -> list[str]:  # type: ignore[type-arg]
    return [decode(Event, entry.fields).header.text for entry in entries]


def consumer(client: redis.Redis, keys: Keys, name: str = "a") -> Consumer:
    return Consumer(client, keys.tickets, "g", name, budget_s=5)


def test_each_entry_goes_to_one_consumer_and_stays_pending_until_acknowledged(
    client: redis.Redis, keys: Keys
) -> None:
    a, b = consumer(client, keys, "a"), consumer(client, keys, "b")
    for text in "wxyz":
        append(client, keys.tickets, event(text))
    first, rest = a.read(2, 0.1), b.read(10, 0.1)
    assert (texts(first), texts(rest)) == (["w", "x"], ["y", "z"])
    assert client.xpending(keys.tickets, "g")["pending"] == 4
    a.ack([entry.id for entry in first])
    assert client.xpending(keys.tickets, "g")["pending"] == 2
    assert client.xlen(keys.tickets) == 2
    assert a.read(10, 0.05) == []


def test_a_restarted_consumer_finds_its_pending_entries_again(client: redis.Redis, keys: Keys) -> None:
    append(client, keys.tickets, event("w"))
    assert texts(consumer(client, keys).read(5, 0.1)) == ["w"]
    again = consumer(client, keys)
    assert texts(again.read(5, 0.1)) == ["w"]
    assert again.read(5, 0.05) == []


def test_heartbeats_keep_entries_and_silence_loses_them(client: redis.Redis, keys: Keys) -> None:
    a, b = consumer(client, keys, "a"), consumer(client, keys, "b")
    append(client, keys.tickets, event("w"))
    (entry,) = a.read(1, 0.1)
    time.sleep(0.3)
    a.refresh([entry.id])
    assert b.claim_stale(0.2, 10) == []
    delivered = client.xpending_range(keys.tickets, "g", "-", "+", 1)[0]["times_delivered"]
    assert delivered == 1  # a heartbeat is not a delivery
    time.sleep(0.3)
    assert texts(b.claim_stale(0.2, 10)) == ["w"]
    assert b.claim_stale(0.0, 10) == []  # held already


def test_what_is_taken_over_is_known_by_its_owner(client: redis.Redis, keys: Keys) -> None:
    a, b, c = (consumer(client, keys, name) for name in "abc")
    ids = [append(client, keys.tickets, event(text)) for text in "wxyz"]
    a.read(2, 0.1)
    b.read(2, 0.1)
    time.sleep(0.3)
    assert c.find_stale(5.0, 10) == []
    found = c.find_stale(0.2, 10)
    assert [(stale.id, stale.owner) for stale in found] == list(zip(ids, "aabb", strict=True))
    assert [stale.owner for stale in b.find_stale(0.2, 10)] == ["a", "a"]
    assert texts(c.look([stale.id for stale in found])) == ["w", "x", "y", "z"]
    b.refresh(ids[3:])  # goes on after all
    taken = c.claim(ids, 0.2, lambda pipe: pipe.set(keys.key("note"), "x"))
    assert texts(taken) == ["w", "x", "y"]
    assert client.get(keys.key("note")) == b"x"


def test_a_lost_group_comes_back(client: redis.Redis, keys: Keys) -> None:
    a = consumer(client, keys)
    client.delete(keys.tickets)
    assert a.read(1, 0.05) == []
    append(client, keys.tickets, event("w"))
    assert texts(a.read(1, 0.1)) == ["w"]


def test_a_group_that_is_lost_again_and_again_comes_back(
    client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, losses = consumer(client, keys), iter(range(2))

    def create(creation: Callable[[], None] = a.ensure) -> None:
        creation()
        if next(losses, None) is not None:
            client.delete(keys.tickets)

    monkeypatch.setattr(a, "ensure", create)
    client.delete(keys.tickets)
    assert a.read(1, 0.05) == []
    append(client, keys.tickets, event("w"))
    assert texts(a.read(1, 0.1)) == ["w"]


def test_deleted_entries_are_not_handed_out(client: redis.Redis, keys: Keys) -> None:
    a = consumer(client, keys)
    ids = [append(client, keys.tickets, event(text)) for text in "wx"]
    assert len(a.read(5, 0.1)) == 2
    client.xdel(keys.tickets, ids[0])
    assert texts(consumer(client, keys).read(5, 0.1)) == ["x"]


def test_tail_sees_everything_from_its_position(client: redis.Redis, keys: Keys) -> None:
    append(client, keys.events, event("w"))
    tail = Tail(client, keys.events)
    assert texts(tail.read(block_s=None)) == ["w"]
    assert tail.read(block_s=None) == []
    append(client, keys.events, event("x"))
    assert texts(tail.read(block_s=0.1)) == ["x"]


def test_a_blocking_read_ends_before_the_socket_times_out(redis_server: EmbeddedRedis, keys: Keys) -> None:
    client = connect(redis_server.url, socket_timeout_s=1.0)
    began = time.monotonic()
    assert consumer(client, keys).read(1, block_s=30) == []
    assert time.monotonic() - began < 0.9
    client.close()


def test_wrong_password_and_no_server(redis_server: EmbeddedRedis) -> None:
    with pytest.raises(RedisRefused, match="check the user and password") as caught:
        connect(redis_server.url.replace(redis_server.password, "wrong"))
    assert "wrong" not in str(caught.value)
    with pytest.raises(RedisUnavailable, match=r"failed for 0\.3 s"):
        connect("redis://:x@127.0.0.1:1/0", wait_s=0.3)
    with pytest.raises(RedisRefused, match=r"expected redis://"):
        connect("http://localhost")


def test_a_full_server_stalls_the_writer_and_loses_nothing(keys: Keys) -> None:
    with EmbeddedRedis(maxmemory_mib=64) as server:
        client = connect(server.url)
        client.set("fill", b"x" * (30 << 20))
        client.config_set("maxmemory", 25 << 20)
        with pytest.raises(RedisUnavailable, match="failed for"):
            append(client, keys.events, event("w"), budget_s=0.5)
        threading.Timer(0.5, lambda: connect(server.url).delete("fill")).start()
        append(client, keys.events, event("x"), budget_s=10)
        assert texts(Tail(client, keys.events).read(block_s=None)) == ["x"]
        client.close()


def test_a_cut_connection_loses_and_repeats_nothing(
    redis_server: EmbeddedRedis, client: redis.Redis, keys: Keys
) -> None:
    other = connect(redis_server.url)
    a = Consumer(other, keys.tickets, "g", "a", budget_s=5)
    got: list[str] = []
    for number in range(30):
        append(client, keys.tickets, event(str(number)))
        if number % 3 == 0:
            client.client_kill_filter(_type="normal", skipme=True)
        entries = a.read(10, 0.05)
        got += texts(entries)
        a.ack([entry.id for entry in entries])
    while len(got) < 30:
        entries = a.read(10, 0.5)
        assert entries
        got += texts(entries)
    assert got == [str(n) for n in range(30)]
    other.close()


class LosesReplies(redis.Connection):
    """A connection that breaks while a reply with entries is on its way, once it is told to."""

    armed = False

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        reply = super().read_response(*args, **kwargs)
        if LosesReplies.armed and isinstance(reply, dict | list) and reply:
            LosesReplies.armed = False
            self.disconnect()
            raise redis.ConnectionError("cut on the way")
        return reply


def losing_replies(server: EmbeddedRedis) -> redis.Redis:
    """A client whose connections are of that kind."""
    retry = connect(server.url).connection_pool.connection_kwargs["retry"]
    pool = redis.ConnectionPool.from_url(server.url, connection_class=LosesReplies, retry=retry)
    return redis.Redis(connection_pool=pool)


def test_a_reply_that_is_lost_on_the_way_is_read_again(
    redis_server: EmbeddedRedis, client: redis.Redis, keys: Keys
) -> None:
    reader = consumer(losing_replies(redis_server), keys)
    assert reader.read(1, 0.05) == []  # the first read looks for what was pending anyway
    append(client, keys.tickets, event("w"))
    LosesReplies.armed = True
    got = reader.read(5, 0.1)
    assert not LosesReplies.armed
    assert texts(got + reader.read(5, 0.1)) == ["w"]
    assert reader.read(5, 0.05) == []


def fill(client: redis.Redis, keys: Keys, count: int, size: int = 1) -> None:
    with client.pipeline(transaction=False) as pipe:
        for number in range(count):
            pipe.xadd(keys.tickets, {"number": number, "payload": b"x" * size})
        pipe.execute()


def read_all(reader: Consumer, count: int) -> list[int]:
    found: list[int] = []
    while entries := reader.read(count, 0.05):
        found += [int(entry.fields[b"number"]) for entry in entries]
    return found


def test_reconnects_are_not_deliveries(redis_server: EmbeddedRedis, client: redis.Redis, keys: Keys) -> None:
    def counts() -> list[int]:
        return [p["times_delivered"] for p in client.xpending_range(keys.tickets, "g", "-", "+", 10)]

    other = connect(redis_server.url)
    a = consumer(other, keys)
    fill(client, keys, 3)
    a.read(3, 0.1)
    for _ in range(3):
        client.client_kill_filter(_type="normal", skipme=True)
        assert a.read(3, 0.05) == []
    assert counts() == [1, 1, 1]
    other.close()


def test_a_lost_reply_among_many_pending_entries_is_found(
    redis_server: EmbeddedRedis, client: redis.Redis, keys: Keys
) -> None:
    reader = consumer(losing_replies(redis_server), keys)
    fill(client, keys, 10 * PAGE + 500)
    assert len(reader.read(10 * PAGE + 100, 0.1)) == 10 * PAGE + 100
    LosesReplies.armed = True
    assert read_all(reader, 64) == list(range(10 * PAGE + 100, 10 * PAGE + 500))
    assert not LosesReplies.armed


def test_a_restarted_consumer_reads_what_is_pending_once(client: redis.Redis, keys: Keys) -> None:
    def sent() -> int:
        return int(client.info("stats")["total_net_output_bytes"])

    count, size = 2 * PAGE, 2_000
    fill(client, keys, count, size)
    assert len(consumer(client, keys).read(count, 0.1)) == count
    before = sent()
    assert read_all(consumer(client, keys), 64) == list(range(count))
    assert sent() - before < 1.5 * count * size


def test_stale_entries_behind_many_fresh_ones_are_claimed(client: redis.Redis, keys: Keys) -> None:
    fill(client, keys, 200)
    a = consumer(client, keys, "a")
    held = [entry.id for entry in a.read(200, 0.1)]
    time.sleep(0.3)
    a.refresh(held[:-1])
    assert [entry.id for entry in consumer(client, keys, "b").claim_stale(0.2, 2)] == held[-1:]


def too_few_replicas(server: EmbeddedRedis, on: bool) -> None:
    connect(server.url).config_set("min-replicas-to-write", int(on))


def full_disk(server: EmbeddedRedis, on: bool) -> None:
    """A save that fails stops all writes, until one succeeds."""
    # Not `connect`: a server with a full disk refuses even PING.
    client, obstacle = redis.Redis.from_url(server.url), server.log_path.parent / "dump.rdb" / "obstacle"
    if on:
        obstacle.parent.unlink(missing_ok=True)
        obstacle.mkdir(parents=True)
    else:
        shutil.rmtree(obstacle.parent)
    client.config_set("save", "3600 1")
    while (client.info("persistence")["rdb_last_bgsave_status"] == "ok") is on:
        with contextlib.suppress(redis.ResponseError):  # one is in progress
            client.bgsave()
        time.sleep(0.05)


def demoted(server: EmbeddedRedis, on: bool) -> None:
    connect(server.url).execute_command("REPLICAOF", *(("127.0.0.1", "1") if on else ("NO", "ONE")))


@pytest.mark.parametrize("trouble", [too_few_replicas, full_disk, demoted])
def test_a_server_that_refuses_writes_for_a_while_is_waited_for(
    trouble: Callable[[EmbeddedRedis, bool], None], keys: Keys
) -> None:
    with EmbeddedRedis(maxmemory_mib=64) as server:
        client = connect(server.url)
        reader = consumer(client, keys)
        append(client, keys.tickets, event("w"))
        trouble(server, True)
        with pytest.raises(RedisUnavailable, match="failed for"):
            append(client, keys.tickets, event("x"), budget_s=0.5)
        threading.Timer(0.5, trouble, (server, False)).start()
        append(client, keys.tickets, event("x"), budget_s=20)
        trouble(server, True)
        threading.Timer(0.5, trouble, (server, False)).start()
        entries = Consumer(client, keys.tickets, "g", "b", budget_s=20).read(5, 0.1)
        assert texts(entries) == ["w", "x"]
        trouble(server, True)
        threading.Timer(0.5, trouble, (server, False)).start()
        reader = Consumer(client, keys.tickets, "g", "b", budget_s=20)
        reader.ack([entry.id for entry in entries])
        assert client.xlen(keys.tickets) == 0
        client.close()


def test_other_errors_are_not_retried(client: redis.Redis) -> None:
    client.set("text", "x")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        retrying(lambda: client.xlen("text"), budget_s=5, what="test")


def test_consumers_that_have_left_are_removed(client: redis.Redis, keys: Keys) -> None:
    left, busy, silent, kept = (
        Consumer(client, keys.tickets, TICKETS_GROUP, name, budget_s=5)
        for name in ("left", "busy", "silent", "kept")
    )
    for consumer in (left, busy, silent, kept):
        client.xadd(keys.tickets, {"x": "1"})
        (entry,) = consumer.read(1, 0)
        if consumer is not silent:
            consumer.ack([entry.id])
    time.sleep(0.2)
    busy.read(1, 0)

    def remove(kept: set[str]) -> int:
        return remove_idle_consumers(client, keys.tickets, TICKETS_GROUP, kept, idle_s=0.1, budget_s=5)

    def names() -> set[bytes]:
        found: Any = client.xinfo_consumers(keys.tickets, TICKETS_GROUP)
        return {consumer["name"] for consumer in found}

    before = names()
    assert remove({"kept", "busy"}) == 0
    assert before - names() == {b"left"}
    assert len(kept.claim_stale(0.0, 10)) == 1, "what is pending was left alone"
    assert remove_idle_consumers(client, keys.key("none"), "none", (), idle_s=0, budget_s=5) == 0
