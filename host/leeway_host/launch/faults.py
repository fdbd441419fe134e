"""The faults of a chaos run: planned as a pure function of a seed, and injected into real processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import psutil
import redis

from leeway.streams import client_name
from leeway_host.launch.services import Service
from leeway_host.redis_server import EmbeddedRedis

Kind = Literal["kill", "pause", "cut", "restart-redis"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PAUSES_S = (2.0, 6.0, 15.0)
"""Lengths of pauses: the last exceeds the defaults of sync.verdict_timeout_s and sync.ticket_idle_s."""
STEPS_PER_FAULT = 2
SAMPLERS = 2
SERVICES = ["controller", "trainer", *(f"sampler-{i}" for i in range(SAMPLERS))]
REDIS = "redis"


@dataclass(frozen=True)
class Fault:
    """One planned fault, due once `after_steps` steps were trained and `delay` of a step's time has passed.

    While `target` is down it hits another service: the run would end before a fault that waits.
    """

    number: int
    kind: Kind
    target: str
    after_steps: int
    delay: float
    pick: float
    """In [0, 1): which of the target's processes a kill hits; 0 is the service itself."""
    pause_s: float = 0.0
    """How long a pause lasts."""


def plan_faults(count: int, seed: int, kinds: Sequence[Kind] = KINDS) -> list[Fault]:
    """`count` faults, their kinds in equal shares and shuffled; a pure function of its arguments."""
    rng = np.random.default_rng(seed)
    targets = {"kill": SERVICES, "pause": [*SERVICES, REDIS], "cut": SERVICES, "restart-redis": [REDIS]}
    order = rng.permutation([i % len(kinds) for i in range(count)])
    faults = []
    for number, index in enumerate(order):
        kind = kinds[int(index)]
        faults.append(
            Fault(
                number=number + 1,
                kind=kind,
                target=str(rng.choice(targets[kind])),
                after_steps=1 + STEPS_PER_FAULT * number + int(rng.integers(STEPS_PER_FAULT)),
                delay=round(float(rng.uniform(0, 1.0)), 3),
                # Half of the kills hit the service itself, the others one of its children.
                pick=round(max(0.0, float(rng.uniform(-1, 1))), 3),
                pause_s=float(rng.choice(PAUSES_S)),
            )
        )
    return faults


class Injector:
    """Injects faults into the processes of one run."""

    def __init__(
        self, run_id: str, server: EmbeddedRedis, client: redis.Redis, services: Sequence[Service]
    ) -> None:
        self.run_id, self.server, self.client = run_id, server, client
        self.services = {service.name: service for service in services}

    def inject(self, fault: Fault) -> str | None:
        """Make it happen; returns what was hit, None while there is nothing to hit."""
        if fault.kind == "restart-redis":
            self.server.restart()
            return "kill -9 redis, restarted"
        if fault.target == REDIS:
            assert self.server.pid is not None
            return _pause(os.kill, self.server.pid, REDIS, fault.pause_s)
        for name in (fault.target, *(name for name in SERVICES if name != fault.target)):
            if (hit := self._hit(fault, name)) is not None:
                return hit
        return None

    def _hit(self, fault: Fault, name: str) -> str | None:
        """The fault on one service; None while that is down, or has no connection to cut."""
        service = self.services[name]
        if service.pid is None or not service.running:
            return None
        if fault.kind == "cut":
            cut = self._cut_connections(name)
            return f"cut {cut} connections of {name}" if cut else None
        if fault.kind == "kill":
            return _kill_one(service, fault.pick)
        return _pause(os.killpg, service.pid, name, fault.pause_s)

    def _cut_connections(self, target: str) -> int:
        name = client_name(self.run_id, target)
        clients: Any = self.client.client_list()
        ids = [client["id"] for client in clients if client["name"] == name]
        return sum(int(self.client.client_kill_filter(_id=i)) for i in ids)


def _kill_one(service: Service, pick: float) -> str | None:
    """SIGKILL to one process of the service's group; returns which, None when there is none."""
    group = [
        process
        for process in psutil.process_iter(["pid", "cmdline"])
        if _in_group(process.pid, service.pid)
        and "resource_tracker" not in " ".join(process.info["cmdline"] or [])
    ]
    group.sort(key=lambda process: (process.pid != service.pid, process.pid))
    if not group:
        return None
    victim = group[int(pick * len(group))]
    _signal(os.kill, victim.pid, signal.SIGKILL)
    child = "" if victim.pid == service.pid else f" (its child {victim.pid})"
    return f"kill -9 {service.name}{child}"


def _pause(send: Callable[[int, int], None], pid: int, name: str, seconds: float) -> str:
    """Stop a process (`os.kill`) or a group (`os.killpg`), and let it continue after `seconds`."""
    _signal(send, pid, signal.SIGSTOP)
    timer = threading.Timer(seconds, _signal, (send, pid, signal.SIGCONT))
    timer.daemon = True
    timer.start()
    return f"pause {name} for {seconds:g} s"


def _in_group(pid: int, group: int | None) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


def _signal(send: Callable[[int, int], None], pid: int, number: int) -> None:
    try:
        send(pid, number)
    except ProcessLookupError:
        pass  # it has ended in the meantime
