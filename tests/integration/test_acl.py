"""Users of a shared server: each service can do its work, and everything else is rejected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch

from leeway.config.identity import identify
from leeway.config.load import build_config
from leeway.incarnations import forget_sampler, read_incarnations, register
from leeway.messages import (
    Event,
    EventHeader,
    Report,
    ReportHeader,
    SamplerStatus,
    Ticket,
    TicketHeader,
    Verdict,
    VerdictHeader,
    encode,
)
from leeway.statuses import forget_samplers, read_statuses, remove_status, write_status
from leeway.streams import (
    CONFIG_FIELD,
    EPOCH_FIELD,
    Consumer,
    Keys,
    RedisRefused,
    Tail,
    add_fields,
    append,
    connect,
    now,
)
from leeway.weights import (
    ChunkSource,
    HostCopy,
    free_versions,
    latest_manifest,
    publish_weights,
    published_manifests,
)
from leeway_controller.reconcile import Controller
from leeway_host.acl import USERS, acl_file, setuser_arguments
from leeway_host.redis_server import EmbeddedRedis

Clients = dict[str, redis.Redis]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def clients(redis_server: EmbeddedRedis, client: redis.Redis, keys: Keys) -> Iterator[Clients]:
    """One connection per service, each as its own user."""
    found = {}
    for service in USERS:
        rules = setuser_arguments(service, "pw", run=f"{keys.run}", sampler="s0")
        client.execute_command("ACL", "SETUSER", f"t-{service}", "reset", *rules)
        found[service] = connect(f"redis://t-{service}:pw@127.0.0.1:{redis_server.port}/0", name="x")
    yield found
    for service, connection in found.items():
        connection.close()
        client.acl_deluser(f"t-{service}")


def ticket() -> Ticket:
    header = TicketHeader(
        ticket_id="t", epoch=0, version=0, batch=0, group=0, index=0, item=0, seed=1, max_new_tokens=4
    )
    return Ticket(header, np.array([5], np.int32))


def status(name: str, **change: Any) -> SamplerStatus:
    return SamplerStatus(sampler=name, heartbeat=now(), **change)


def weights(client: redis.Redis, keys: Keys, version: int) -> None:
    tensors = [("w", torch.ones(8))]
    publish_weights(client, keys, epoch=1, version=version, step=0, tensors=tensors)


def test_each_service_can_do_its_work(clients: Clients, keys: Keys) -> None:
    controller, trainer, sampler, operator = (clients[name] for name in USERS)
    note = Event(EventHeader(source="x", name="x", text="x"))
    # The trainer starts and publishes.
    trainer.hincrby(keys.state, EPOCH_FIELD, 1)
    for version in range(3):
        weights(trainer, keys, version)
    free_versions(trainer, keys, published_manifests(trainer, keys)[:2], epoch=1)
    append(trainer, keys.reports, Report(ReportHeader(event="started", epoch=0, step=0, version=2)))
    rollouts = Consumer(trainer, keys.rollouts, "trainer", "trainer", budget_s=2)
    assert trainer.info("memory")["used_memory"] > 0
    # The controller answers and issues.
    reports = Consumer(controller, keys.reports, "controller", "controller", budget_s=2)
    (report,) = reports.read(1, 0.5)
    with controller.pipeline(transaction=True) as pipe:
        add_fields(pipe, keys.verdicts, encode(Verdict(VerdictHeader(epoch=0, step=0, action="continue"))))
        reports.queue_ack(pipe, [report.id], delete=False)
        pipe.xtrim(keys.reports, minid=report.id, approximate=True)
        pipe.hset(keys.state, "controller", "{}")
        pipe.execute()
    Consumer(controller, keys.rollouts, "trainer", "controller", budget_s=2)
    Consumer(controller, keys.tickets, "samplers", "controller", budget_s=2)
    append(controller, keys.tickets, ticket())
    assert Tail(controller, keys.weights).read(block_s=None)
    # The sampler loads, attests, answers.
    manifest = latest_manifest(sampler, keys)
    assert manifest is not None
    with HostCopy() as copy:
        copy.advance(ChunkSource(sampler), keys, [manifest])
    assert sampler.hget(keys.fences, "s0") is None
    assert sampler.get(keys.probe) is None
    assert sampler.hget(keys.state, CONFIG_FIELD) is None
    write_status(sampler, keys, status("s0"), budget_s=2)
    tickets = Consumer(sampler, keys.tickets, "samplers", "s0", budget_s=2)
    (entry,) = tickets.read(1, 0.5)
    tickets.refresh([entry.id])
    assert tickets.claim_stale(0.0, 1) == []
    assert tickets.find_stale(0.0, 1) == []
    assert tickets.look([entry.id]) == [entry]
    register(sampler, keys, "s0:1", budget_s=2)
    assert read_incarnations(sampler, keys, budget_s=2) == {"s0": "1"}
    with sampler.pipeline(transaction=True) as pipe:
        pipe.hsetnx(keys.suspects, "t", "s0")
        pipe.xclaim(keys.tickets, "samplers", "s0", 0, [entry.id])
        pipe.hgetall(keys.suspects)
        pipe.hdel(keys.suspects, "t")
        pipe.execute()
    with sampler.pipeline(transaction=True) as pipe:
        add_fields(pipe, keys.rollouts, {b"h": b"{}"})
        add_fields(pipe, keys.tickets, entry.fields)
        tickets.queue_ack(pipe, [entry.id])
        pipe.execute()
    # The trainer takes it, and everyone may say something.
    (rollout,) = rollouts.read(1, 0.5)
    rollouts.ack([rollout.id])
    assert len(Tail(trainer, keys.verdicts).read(block_s=0.1)) == 1
    for connection in (controller, trainer, sampler):
        append(connection, keys.events, note, maxlen=100)
    for reader in (controller, trainer, operator):
        assert [s.sampler for s in read_statuses(reader, keys, budget_s=2)] == ["s0"]
    remove_status(controller, keys, "s0", budget_s=2)
    assert forget_samplers(controller, keys, budget_s=2) == ["s0"]
    forget_sampler(controller, keys, "s0", budget_s=2)
    controller.hset(keys.fences, "s0", "x")
    controller.hset(keys.checks, "x", "y")
    trainer.hset(keys.checks, "x", "y")


def test_a_controller_of_its_own_user_runs(clients: Clients, keys: Keys) -> None:
    controller, trainer, sampler, _ = (clients[name] for name in USERS)
    config = build_config({"task": {"kind": "digits"}, "batch": {"prompts": 2, "group_size": 2}})
    running = Controller(controller, keys, config, lambda item: [item + 1], 7)
    weights(trainer, keys, 0)
    digest = identify(config).digest
    header = ReportHeader(event="started", epoch=1, step=0, version=0, config=digest)
    append(trainer, keys.reports, Report(header))
    manifest = latest_manifest(sampler, keys)
    assert manifest is not None
    loaded = status("s0", epoch=1, version=0, digest=manifest.digest, config=digest, ready=True)
    write_status(sampler, keys, loaded, budget_s=2)
    for _ in range(3):
        running.tick()
    assert len(Consumer(sampler, keys.tickets, "samplers", "s0", budget_s=2).read(100, 0.5)) == 8


def everything(keys: Keys, other: Keys) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """Command -> what it is tried on, as (what the table calls it, arguments)."""
    streams = {
        "tickets": keys.tickets,
        "rollouts": keys.rollouts,
        "weights": keys.weights,
        "chunks": keys.weight_chunks(0, 1),
        "reports": keys.reports,
        "verdicts": keys.verdicts,
        "events": keys.events,
    }
    hashes = {name: keys.key(name) for name in ("state", "requests", "fences", "checks", "suspects")}
    statuses = {"own status": keys.sampler("s0"), "others' status": keys.sampler("s1")}
    sets = {"samplers": keys.samplers, "streams": keys.weight_streams}
    foreign = {"another run": other.rollouts, "another key": "other"}
    all_keys = {**streams, **hashes, **statuses, **sets, "probe": keys.probe, **foreign}

    def on(places: dict[str, str], before: str = "", after: str = "") -> list[tuple[str, tuple[str, ...]]]:
        return [(what, (*before.split(), key, *after.split())) for what, key in places.items()]

    more = {"another run": other.rollouts}
    return {
        "XADD": on({**streams, **more}, after="* h {}"),
        "XADD MAXLEN 1": on({**streams, **more}, after="MAXLEN 1 * h {}"),
        "XTRIM": on({**streams, **more}, after="MAXLEN 0"),
        "XDEL": on({**streams, **more}, after="1-1"),
        "XSETID": on({**streams, **more}, after="9-9"),
        "XACK": on({**streams, **more}, after="group 1-1"),
        "XCLAIM": on({**streams, **more}, after="group consumer 0 1-1"),
        "XGROUP CREATE": on({**streams, **more}, "CREATE", "group 0 MKSTREAM"),
        "XGROUP DESTROY": on({**streams, **more}, "DESTROY", "group"),
        "XGROUP SETID": on({**streams, **more}, "SETID", "group 0"),
        "XGROUP DELCONSUMER": on({**streams, **more}, "DELCONSUMER", "group consumer"),
        "XRANGE": on({**streams, **more}, after="- +"),
        "XREAD": on({**streams, **more}, "STREAMS", "0"),
        "XREADGROUP": on({**streams, **more}, "GROUP group consumer STREAMS", ">"),
        "HSET": on({**hashes, **more}, after="field value"),
        "HDEL": on({**hashes, **more}, after="field"),
        "HGETALL": on({**hashes, **more}),
        "SET": on({**statuses, "probe": keys.probe, **foreign}, after="value"),
        "GET": on({**statuses, "probe": keys.probe, **foreign}),
        "SADD": on(sets, after="member"),
        "SREM": on(sets, after="member"),
        "DEL": on(all_keys),
        "UNLINK": on(all_keys),
        "RENAME": on(all_keys, after="elsewhere"),
        "COPY": on(all_keys, after="elsewhere"),
        "DUMP": on(all_keys),
        "EXPIRE": on(all_keys, after="1"),
        "OBJECT FREQ": on(all_keys, "FREQ"),
        "MEMORY USAGE": on(all_keys, "USAGE"),
        **{
            command: [("yes", tuple(command.split()[1:]))]
            for command in (
                "KEYS *", "SCAN 0", "RANDOMKEY", "DBSIZE", "INFO", "INFO memory", "INFO keyspace",
                "CONFIG GET *", "CONFIG SET maxmemory 1", "ACL LIST", "ACL SETUSER x", "ACL WHOAMI",
                "CLIENT LIST", "CLIENT KILL 1.2.3.4:1", "CLIENT PAUSE 1", "MONITOR", "SLOWLOG GET",
                "LATENCY RESET",
                "FLUSHALL", "FLUSHDB", "SWAPDB 0 1", "SELECT 1", "MOVE other 1", "SHUTDOWN NOSAVE", "SAVE",
                "REPLICAOF NO ONE", "EVAL return 0", "FUNCTION LIST", "FCALL f 0",
                "PUBLISH channel x", "SUBSCRIBE channel", "WAIT 0 0", "COMMAND COUNT",
            )
        },
    }  # fmt: skip


def allowed(client: redis.Redis, user: str, words: tuple[str, ...]) -> bool:
    """What the server would do, without doing it."""
    return client.execute_command("ACL", "DRYRUN", user, *words) == b"OK"


def test_everything_else_is_rejected(clients: Clients, client: redis.Redis, keys: Keys) -> None:
    """Every user tries all that it may not do; what is allowed is the table of docs/permissions.md."""
    lines = [f"| command | {' | '.join(USERS)} |", "|---" * (len(USERS) + 1) + "|"]
    nobody, tried = [], 0
    for command, places in everything(keys, Keys(f"{keys.run}-other")).items():
        name = command if places[0][0] == "yes" else command.split(" MAXLEN")[0]
        cells = []
        for user in USERS:
            may = []
            for what, arguments in places:
                words = (name.split()[0], *arguments)
                if allowed(client, f"t-{user}", words):
                    may.append(what)
                    continue
                tried += 1
                with pytest.raises(redis.exceptions.NoPermissionError):
                    clients[user].execute_command(*words)
            cells.append(", ".join(may) or "-")
        if set(cells) == {"-"}:
            nobody.append(f"`{command}`")
        else:
            lines.append(f"| `{command}` | {' | '.join(cells)} |")
    table = "\n".join(lines) + f"\n\nRefused to all of them: {', '.join(nobody)}.\n"
    print(f"{tried} commands were rejected\n{table}")
    page = (ROOT / "docs" / "permissions.md").read_text(encoding="utf-8")
    assert table in page, f"docs/permissions.md should have this table:\n{table}"


def test_rules_for_one_run_shut_out_the_others(redis_server: EmbeddedRedis, client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "one", "reset", *setuser_arguments("sampler", "pw", run="mine"))
    mine = connect(f"redis://one:pw@127.0.0.1:{redis_server.port}/0")
    write_status(mine, Keys("mine"), status("s0"), budget_s=2)
    with pytest.raises(redis.exceptions.NoPermissionError):
        write_status(mine, Keys("other"), status("s0"), budget_s=2)
    client.acl_deluser("one")
    with pytest.raises(RedisRefused, match="check the user and password"):
        connect(f"redis://one:pw@127.0.0.1:{redis_server.port}/0")


def test_the_file_is_what_the_server_reads(tmp_path, redis_server: EmbeddedRedis) -> None:  # type: ignore[no-untyped-def]
    import subprocess

    from leeway_host.redis_server import find_server, free_port

    lines = acl_file(dict.fromkeys(USERS, "pw")) + "user default off\n"
    (tmp_path / "users.acl").write_text(lines)
    port = free_port()
    server = subprocess.Popen(
        [find_server(), "--port", str(port), "--aclfile", str(tmp_path / "users.acl"), "--save", ""],
        stdout=subprocess.PIPE,
    )
    try:
        connect(f"redis://leeway-trainer:pw@127.0.0.1:{port}/0", wait_s=10).close()
        with pytest.raises(RedisRefused):
            connect(f"redis://127.0.0.1:{port}/0", wait_s=2)
    finally:
        server.kill()
        server.wait()
