"""A sampler process from the outside: tickets in, rollouts out, and nothing lost on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import redis
from sampler_support import perturbed, save_tiny_model

from leeway.config import RunConfig
from leeway.config.identity import identify
from leeway.config.load import dump_config
from leeway.messages import Rollout, SamplerStatus, Ticket, TicketHeader, decode, encode
from leeway.streams import ROLLOUTS_GROUP, TICKETS_GROUP, Consumer, Keys, add_fields, connect
from leeway.weights import WeightManifest, publish_weights
from leeway_host.redis_server import free_port

pytestmark = pytest.mark.timeout(400)
PROMPT = np.array([4, 9, 17, 30, 5, 61], dtype=np.int32)


def wait_for(what: str, condition: Callable[[], Any], budget_s: float = 30.0) -> Any:
    deadline = time.monotonic() + budget_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    pytest.fail(f"not within {budget_s:g} s: {what}")


@dataclass
class Rig:
    """A run with a sampler process; `tickets` writes tickets, `rollouts` reads what came back."""

    directory: Path
    url: str
    keys: Keys
    client: redis.Redis
    port: int
    base: dict[str, Any]
    digest: str
    process: subprocess.Popen[bytes] | None = None
    version: int = 0
    seen: dict[str, Rollout] = field(default_factory=dict)
    duplicates: int = 0

    def start(self) -> None:
        argv = [sys.executable, "-m", "leeway_sampler", "--config", str(self.directory / "config.yaml")]
        argv += ["--run", self.keys.run, "--redis", "env:URL", "--model", str(self.directory)]
        argv += ["--id", "s0", "--port", str(self.port)]
        with (self.directory / "log").open("ab") as log:
            env = {**os.environ, "URL": self.url}
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=env)
        wait_for("the first heartbeat", lambda: self.status() or self.process.poll() is not None, 300)
        assert self.process.poll() is None, (self.directory / "log").read_text()[-3000:]

    def status(self) -> SamplerStatus | None:
        raw: Any = self.client.hget(self.keys.samplers, "s0")
        return SamplerStatus.model_validate_json(raw) if raw else None

    def publish(self, epoch: int = 0) -> WeightManifest:
        self.version += 1
        tensors = perturbed(self.base, self.version)
        return publish_weights(
            self.client,
            self.keys,
            epoch=epoch,
            version=self.version,
            step=0,
            tensors=tensors.items(),
            config=self.digest,
        )

    def sync(self, epoch: int = 0) -> None:
        manifest = self.publish(epoch)

        def attested() -> bool:
            s = self.status()
            held = (epoch, self.version, manifest.digest, True)
            return s is not None and (s.epoch, s.version, s.digest, s.ready) == held

        wait_for(f"version {self.version} is attested", attested)

    def tickets(self, batch: int, count: int, *, epoch: int = 0, version: int | None = None) -> list[str]:
        names = []
        for index in range(count):
            header = TicketHeader(
                ticket_id=f"{epoch}.{batch}.{index}",
                epoch=epoch,
                version=self.version if version is None else version,
                batch=batch,
                group=0,
                index=index,
                item=index,
                seed=index,
                config=self.digest,
                max_new_tokens=100,
            )
            add_fields(self.client, self.keys.tickets, encode(Ticket(header, PROMPT)))
            names.append(header.ticket_id)
        return names

    def collect(self) -> None:
        for entry in self.trainer.read(100, 0.01):
            rollout = decode(Rollout, entry.fields)
            self.duplicates += rollout.header.ticket_id in self.seen
            self.seen[rollout.header.ticket_id] = rollout
            self.trainer.ack([entry.id])

    def await_rollouts(self, names: list[str], budget_s: float = 40.0) -> list[Rollout]:
        def all_there() -> bool:
            self.collect()
            return set(names) <= set(self.seen)

        wait_for(f"{len(names)} rollouts", all_there, budget_s)
        return [self.seen[name] for name in names]

    def pending(self) -> int:
        return self.client.xpending(self.keys.tickets, TICKETS_GROUP)["pending"]  # type: ignore[index]

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)

    def __post_init__(self) -> None:
        self.trainer = Consumer(self.client, self.keys.rollouts, ROLLOUTS_GROUP, "trainer")


@pytest.fixture(scope="module")
def rig(tmp_path_factory, redis_server) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("serve")
    model = save_tiny_model(directory, tied=True)
    config = RunConfig.model_validate(
        {
            "task": {"kind": "digits"},
            "model": {"max_length": 120},
            "sync": {"heartbeat_s": 0.3, "ticket_idle_s": 2.0},
            "sampler": {"drain_s": 20.0, "stall_timeout_s": 15.0},
        }
    )
    (directory / "config.yaml").write_text(dump_config(config))
    client = connect(redis_server.url)
    base = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    rig = Rig(directory, redis_server.url, Keys("serve"), client, free_port(), base, identify(config).digest)
    try:
        rig.start()
        yield rig
    finally:
        rig.kill()
        client.close()


def http(rig: Rig, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{rig.port}{path}", timeout=5) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_it_is_ready_only_with_the_current_version(rig):
    assert http(rig, "/healthz") == (200, {"healthy": True})
    assert http(rig, "/readyz")[0] == 503
    assert not rig.status().ready
    rig.sync()
    assert http(rig, "/readyz") == (200, {"ready": True, "epoch": 0, "version": 1})


def test_each_ticket_becomes_one_rollout_of_its_version(rig):
    rig.sync()
    names = rig.tickets(1, 12)
    for index, rollout in enumerate(rig.await_rollouts(names)):
        header = rollout.header
        assert (header.version, header.batch, header.index, header.item) == (rig.version, 1, index, index)
        assert header.spans == [(0, rollout.response_ids.size, rig.version)]
        assert rollout.prompt_ids.tolist() == PROMPT.tolist()
        assert header.reward_error is None
    wait_for("acknowledgement", lambda: rig.pending() == 0)
    assert rig.client.xlen(rig.keys.tickets) == 0
    assert rig.duplicates == 0
    status = wait_for("counters", lambda: rig.status() if rig.status().tickets >= 12 else None)
    assert status.tokens >= sum(r.response_ids.size for r in rig.seen.values())
    assert status.busy_s > 0


def test_tickets_of_older_versions_and_epochs_are_void(rig):
    rig.sync(epoch=1)
    old = rig.tickets(2, 3, epoch=1, version=rig.version - 1) + rig.tickets(3, 3, epoch=0)
    new = rig.tickets(4, 2, epoch=1)
    rig.await_rollouts(new)
    wait_for("acknowledgement", lambda: rig.pending() == 0)
    rig.collect()
    assert not set(old) & set(rig.seen)


def test_a_resync_voids_what_is_in_flight(rig):
    rig.sync(epoch=1)
    first = rig.version
    rig.tickets(5, 64, epoch=1)
    wait_for("work", lambda: rig.status().inflight)
    rig.sync(epoch=1)
    again = rig.tickets(6, 4, epoch=1)
    assert {r.header.version for r in rig.await_rollouts(again)} == {rig.version}
    wait_for("acknowledgement", lambda: rig.pending() == 0)
    rig.collect()
    done = [r for r in rig.seen.values() if r.header.batch == 5]
    assert all(r.header.version == first for r in done)
    assert len(done) < 64
    assert rig.status().tokens_voided > 0


def test_tickets_of_a_dead_sampler_are_taken_over(rig):
    rig.sync(epoch=1)
    wait_for("idle", lambda: rig.status().inflight == 0)
    dead = Consumer(rig.client, rig.keys.tickets, TICKETS_GROUP, "dead")
    os.kill(rig.process.pid, signal.SIGSTOP)
    try:
        time.sleep(0.6)  # its blocking read ends
        names = rig.tickets(7, 5, epoch=1)
        taken = dead.read(5, 1.0)
    finally:
        os.kill(rig.process.pid, signal.SIGCONT)
    assert taken
    rig.await_rollouts(names)
    wait_for("acknowledgement", lambda: rig.pending() == 0)


def test_a_newer_ticket_waits_for_its_version(rig):
    rig.sync(epoch=1)
    names = rig.tickets(8, 2, epoch=1, version=rig.version + 1)
    time.sleep(1.0)
    assert rig.client.xlen(rig.keys.tickets) == 2
    rig.sync(epoch=1)
    rig.await_rollouts(names)


def test_sigterm_finishes_what_is_in_flight_and_leaves(rig):
    rig.sync(epoch=1)
    names = rig.tickets(9, 32, epoch=1)
    wait_for("work", lambda: rig.status().inflight)
    rig.process.send_signal(signal.SIGTERM)
    assert rig.process.wait(60) == 0
    assert rig.status() is None
    rig.collect()
    left = rig.client.xlen(rig.keys.tickets)
    answered = len(set(names) & set(rig.seen))
    assert answered > 0
    assert answered + left == len(names)
    assert rig.pending() == 0
    rig.client.delete(rig.keys.tickets)
    rig.client.xgroup_create(rig.keys.tickets, TICKETS_GROUP, id="0", mkstream=True)


@pytest.mark.slow
def test_a_killed_sampler_leaves_no_engine_behind_and_its_successor_does_its_work(rig):
    if rig.process.poll() is not None:  # drained by the test before, when that ran
        rig.start()
    wait_for("its first heartbeat", rig.status, 300)
    rig.sync(epoch=2)
    children = psutil.Process(rig.process.pid).children(recursive=True)
    assert children
    names = rig.tickets(10, 32, epoch=2)
    wait_for("work", lambda: rig.status().inflight)
    rig.kill()
    wait_for("the end of its processes", lambda: not any(child.is_running() for child in children))
    rig.client.hdel(rig.keys.samplers, "s0")
    rig.start()
    rig.await_rollouts(names, 150)


@pytest.mark.slow
def test_an_engine_that_hangs_ends_its_sampler_and_another_gets_the_tickets(rig):
    if rig.process.poll() is not None:
        rig.start()
    wait_for("its first heartbeat", rig.status, 300)
    rig.sync(epoch=3)
    rig.await_rollouts(rig.tickets(11, 2, epoch=3))
    children = psutil.Process(rig.process.pid).children(recursive=True)
    (core,) = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
    core.suspend()
    names = rig.tickets(12, 5, epoch=3)
    wait_for("work", lambda: rig.status().inflight)
    assert rig.process.wait(120) == 1
    assert "vLLM has drawn no token for" in (rig.directory / "log").read_text()
    wait_for("the end of its processes", lambda: not any(child.is_running() for child in children))
    other = Consumer(rig.client, rig.keys.tickets, TICKETS_GROUP, "other")
    wait_for("claims without renewal", lambda: len(other.find_stale(2.0, 10)) == len(names))
