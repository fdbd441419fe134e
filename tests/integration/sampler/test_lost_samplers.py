"""Processes of samplers that are stopped, and that die, with the default limits; the engine is played."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch

from leeway.config.identity import identify
from leeway.config.load import build_config
from leeway.errors import EXIT_POISONED
from leeway.messages import Rollout, Ticket, TicketHeader, decode, encode
from leeway.streams import TICKETS_GROUP, Keys, Tail, add_fields
from leeway.weights import publish_weights
from leeway_host.redis_server import EmbeddedRedis

pytestmark = pytest.mark.timeout(180)
SCRIPT = Path(__file__).parent / "played_sampler.py"
CONFIG: dict[str, Any] = {
    "task": {"kind": "digits"},
    "sync": {"heartbeat_s": 0.1, "ticket_idle_s": 1.0},
    "sampler": {"drain_s": 0.2},
    "checks": {"probe_draws": 0},
}
LIMITS = build_config(CONFIG).sampler
DIGEST = identify(build_config(CONFIG)).digest


class Samplers:
    """The processes of one run."""

    def __init__(self, url: str, client: redis.Redis, keys: Keys) -> None:
        self.url, self.client, self.keys = url, client, keys
        self.processes: list[subprocess.Popen[str]] = []
        publish_weights(
            client, keys, epoch=0, version=1, step=0, tensors=[("w", torch.zeros(2))], config=DIGEST
        )

    def start(self, name: str, seconds: float, victim: str = "-") -> subprocess.Popen[str]:
        argv = [sys.executable, str(SCRIPT), self.url, self.keys.run, name, json.dumps(CONFIG)]
        process = subprocess.Popen([*argv, str(seconds), victim], stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def tickets(self, count: int) -> list[str]:
        for index in range(count):
            header = TicketHeader(
                ticket_id=f"t{index}", epoch=0, version=1, batch=0, group=0, index=index, item=index,
                seed=index, max_new_tokens=8, config=DIGEST,
            )  # fmt: skip
            add_fields(self.client, self.keys.tickets, encode(Ticket(header, np.array([5], np.int32))))
        return [f"t{index}" for index in range(count)]

    def holders(self) -> set[str]:
        """Samplers with pending tickets."""
        try:
            pending: Any = self.client.xpending_range(self.keys.tickets, TICKETS_GROUP, "-", "+", 100)
        except redis.ResponseError:
            return set()  # nobody has opened the stream yet
        return {p["consumer"].decode().split(":")[0] for p in pending}

    def answered(self) -> set[str]:
        entries = Tail(self.client, self.keys.rollouts).read(1000, block_s=None)
        return {decode(Rollout, entry.fields).header.ticket_id for entry in entries}


@pytest.fixture
def samplers(redis_server: EmbeddedRedis, client: redis.Redis, keys: Keys) -> Iterator[Samplers]:
    made = Samplers(redis_server.url, client, keys)
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


def wait_for(what: str, condition: Callable[[], object], budget_s: float = 60.0) -> None:
    deadline = time.monotonic() + budget_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {budget_s:g} s: {what}"
        time.sleep(0.05)


def test_samplers_that_are_stopped_one_after_the_other_end_nothing(samplers: Samplers) -> None:
    """More of them than max_deliveries, each for longer than sync.ticket_idle_s, and with every ticket."""
    names = samplers.tickets(4)
    count = LIMITS.max_deliveries + 1
    stopped = []
    for number in range(count):
        process = samplers.start(f"s{number}", seconds=60.0)
        wait_for(f"s{number} has the tickets", lambda n=number: samplers.holders() == {f"s{n}"})  # type: ignore[misc]
        os.kill(process.pid, signal.SIGSTOP)
        stopped.append(process)
    last = samplers.start("last", seconds=0.1)
    wait_for("every ticket is answered", lambda: samplers.answered() == set(names))
    for process in stopped:
        os.kill(process.pid, signal.SIGCONT)
    more = [*stopped, last]
    assert [process.poll() for process in more] == [None] * len(more), "nobody ended"
    for process in more:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in more] == [0] * len(more)
    assert samplers.client.hlen(samplers.keys.suspects) == 0
    assert samplers.client.xinfo_consumers(samplers.keys.tickets, TICKETS_GROUP) == []


def test_a_ticket_that_kills_every_sampler_ends_the_run(samplers: Samplers) -> None:
    """Two samplers that are restarted at once, as the launcher does it."""
    samplers.tickets(6)
    running = {name: samplers.start(name, 0.2, victim="t3") for name in ("a", "b")}
    deaths, codes = 0, []
    deadline = time.monotonic() + 120
    while not codes:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        for name, process in running.items():
            code = process.poll()
            if code == -signal.SIGKILL:
                deaths += 1
                running[name] = samplers.start(name, 0.2, victim="t3")
            elif code is not None:
                codes.append(code)
                assert process.stderr is not None
                said = process.stderr.read()
    assert codes == [EXIT_POISONED], said
    assert "ticket t3 (item 3 of the data set" in said
    assert LIMITS.max_deliveries <= deaths <= LIMITS.max_deliveries + 1
    answered = samplers.answered()
    assert "t3" not in answered
    assert len(answered) + samplers.client.xlen(samplers.keys.tickets) == 6, "nothing is dropped"
