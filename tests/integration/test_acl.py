"""Users of a shared server: each service can do its work, and everything else is rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
from leeway_host.acl import SERVICES, acl_file, setuser_arguments
from leeway_host.redis_server import EmbeddedRedis

Clients = dict[str, redis.Redis]


@pytest.fixture
def clients(redis_server: EmbeddedRedis, client: redis.Redis) -> Iterator[Clients]:
    """One connection per service, each as its own user."""
    found = {}
    for service in SERVICES:
        client.execute_command("ACL", "SETUSER", f"t-{service}", "reset", *setuser_arguments(service, "pw"))
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


def weights(client: redis.Redis, keys: Keys, version: int) -> None:
    tensors = [("w", torch.ones(8))]
    publish_weights(client, keys, epoch=1, version=version, step=0, tensors=tensors)


def test_each_service_can_do_its_work(clients: Clients, keys: Keys) -> None:
    controller, trainer, sampler = (clients[name] for name in SERVICES)
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
    assert latest_manifest(controller, keys) is not None
    # The sampler loads, attests, answers.
    manifest = latest_manifest(sampler, keys)
    assert manifest is not None
    with HostCopy() as copy:
        copy.advance(ChunkSource(sampler), keys, [manifest])
    assert sampler.hget(keys.fences, "s0") is None
    assert sampler.get(keys.probe) is None
    assert sampler.hget(keys.state, CONFIG_FIELD) is None
    sampler.hset(keys.samplers, "s0", "{}")
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
    Consumer(sampler, keys.tickets, "samplers", "s1", budget_s=2).read(1, 0)
    assert tickets.others() == ["s1"]
    tickets.remove("s1")
    assert tickets.others() == []
    with sampler.pipeline(transaction=True) as pipe:
        add_fields(pipe, keys.rollouts, {b"h": b"{}"})
        add_fields(pipe, keys.tickets, entry.fields)
        tickets.queue_ack(pipe, [entry.id])
        pipe.execute()
    # The trainer takes it, and everyone may say something.
    (rollout,) = rollouts.read(1, 0.5)
    rollouts.ack([rollout.id])
    assert len(Tail(trainer, keys.verdicts).read(block_s=0.1)) == 1
    for connection in clients.values():
        append(connection, keys.events, note, maxlen=100)
    assert list(controller.hgetall(keys.samplers)) == [b"s0"]
    assert controller.hdel(keys.samplers, "s0") == 1
    forget_sampler(controller, keys, "s0", budget_s=2)
    controller.hset(keys.fences, "s0", "x")
    controller.hset(keys.checks, "x", "y")
    trainer.hset(keys.checks, "x", "y")


def test_a_controller_of_its_own_user_runs(clients: Clients, keys: Keys) -> None:
    controller, trainer, sampler = (clients[name] for name in SERVICES)
    config = build_config({"task": {"kind": "digits"}, "batch": {"prompts": 2, "group_size": 2}})
    running = Controller(controller, keys, config, lambda item: [item + 1], 7)
    weights(trainer, keys, 0)
    digest = identify(config).digest
    header = ReportHeader(event="started", epoch=1, step=0, version=0, config=digest)
    append(trainer, keys.reports, Report(header))
    manifest = latest_manifest(sampler, keys)
    assert manifest is not None
    status = SamplerStatus(
        sampler="s0", heartbeat=now(), epoch=1, version=0, digest=manifest.digest, config=digest, ready=True
    )
    sampler.hset(keys.samplers, "s0", status.model_dump_json())
    for _ in range(3):
        running.tick()
    assert len(Consumer(sampler, keys.tickets, "samplers", "s0", budget_s=2).read(100, 0.5)) == 8


FORBIDDEN: dict[str, tuple[str, Callable[[redis.Redis, Keys], object]]] = {
    "sampler publishes weights": ("sampler", lambda c, k: c.xadd(k.weights, {"manifest": "{}"})),
    "sampler writes a chunk": ("sampler", lambda c, k: c.xadd(k.weight_chunks(0, 1), {"data": "x"})),
    "sampler deletes weights": ("sampler", lambda c, k: c.unlink(k.weight_chunks(0, 1))),
    "sampler writes a verdict": ("sampler", lambda c, k: c.xadd(k.verdicts, {"h": "{}"})),
    "sampler writes a report": ("sampler", lambda c, k: c.xadd(k.reports, {"h": "{}"})),
    "sampler deletes rollouts": ("sampler", lambda c, k: c.xtrim(k.rollouts, maxlen=0)),
    "sampler reads rollouts": ("sampler", lambda c, k: c.xrange(k.rollouts)),
    "sampler lifts its fence": ("sampler", lambda c, k: c.hdel(k.fences, "s0")),
    "sampler changes the state": ("sampler", lambda c, k: c.hset(k.state, EPOCH_FIELD, 9)),
    "trainer writes a verdict": ("trainer", lambda c, k: c.xadd(k.verdicts, {"h": "{}"})),
    "trainer writes a ticket": ("trainer", lambda c, k: c.xadd(k.tickets, {"h": "{}"})),
    "controller publishes weights": ("controller", lambda c, k: c.xadd(k.weights, {"manifest": "{}"})),
    "controller writes a rollout": ("controller", lambda c, k: c.xadd(k.rollouts, {"h": "{}"})),
    "sampler uses another key": ("sampler", lambda c, k: c.set("other", "x")),
    "trainer empties the server": ("trainer", lambda c, k: c.flushall()),
    "controller changes the server": ("controller", lambda c, k: c.config_set("maxmemory", 1)),
    "sampler makes a user": ("sampler", lambda c, k: c.execute_command("ACL", "SETUSER", "x")),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_everything_else_is_rejected(clients: Clients, keys: Keys, what: str) -> None:
    service, attempt = FORBIDDEN[what]
    with pytest.raises(redis.exceptions.NoPermissionError):
        attempt(clients[service], keys)


def test_rules_for_one_run_shut_out_the_others(redis_server: EmbeddedRedis, client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "one", "reset", *setuser_arguments("sampler", "pw", run="mine"))
    mine = connect(f"redis://one:pw@127.0.0.1:{redis_server.port}/0")
    mine.hset(Keys("mine").samplers, "s0", "{}")
    with pytest.raises(redis.exceptions.NoPermissionError):
        mine.hset(Keys("other").samplers, "s0", "{}")
    client.acl_deluser("one")
    with pytest.raises(RedisRefused, match="check the user and password"):
        connect(f"redis://one:pw@127.0.0.1:{redis_server.port}/0")


def test_the_file_is_what_the_server_reads(tmp_path, redis_server: EmbeddedRedis) -> None:  # type: ignore[no-untyped-def]
    import subprocess

    from leeway_host.redis_server import find_server, free_port

    lines = acl_file(dict.fromkeys(SERVICES, "pw")) + "user default off\n"
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
