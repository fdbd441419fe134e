"""Virtual time instead of real time, for as long as a history runs.

What is replaced is what a service can wait for or read a clock with: `time.monotonic`, `time.time`,
`time.sleep` and the `sleep` of redis-py, and `os.fsync`, which is where a process can be interrupted between
two writes to disk. Everything else is as it is outside.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import redis.client
import redis.connection
import redis.retry

import leeway.incarnations as incarnations
import leeway.streams.authority as authority
import leeway.streams.clock as clock
import leeway_controller.reconcile as reconcile
import leeway_sampler.serve as serve
import leeway_trainer.feed as feed
from leeway_simulation.scheduler import Process, Simulation

COARSER: tuple[tuple[Any, str, float], ...] = (
    (reconcile, "BLOCK_S", 1.0),
    (feed, "POLL_S", 1.0),
    (serve, "NOT_READY_S", 0.1),
)
"""Waits that end when something arrives anyway. Fewer of them take place for nothing."""
WALL_S = 1_700_000_000.0
"""Unix time at which every history begins."""
FSYNC_S = 0.005
UNSHARED: tuple[tuple[Any, str, Callable[[Process], Any]], ...] = (
    (clock, "_followed", lambda process: (WALL_S + process.wall_offset_s, 0.0)),
    (authority, "_process_id", str),
)
"""Module globals that belong to one process, and their first values."""


def switch(before: Process | None, after: Process) -> None:
    """Put the module globals of process `after` in place."""
    for module, name, first in UNSHARED:
        if before is not None:
            before.state[name] = getattr(module, name)
        setattr(module, name, after.state[name] if name in after.state else first(after))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of redis-py's own metrics, which nobody reads and which take a tenth of the time."""


def _metrics_of_redis() -> list[tuple[Any, str, Any]]:
    modules = (redis.client, redis.connection)
    return [(m, name, _nothing) for m in modules for name in vars(m) if name.startswith("record_")]


@contextmanager
def virtual_time(simulation: Simulation, connection_class: type[Any]) -> Iterator[None]:
    """Inside, clocks and sleeps of the services are those of `simulation`, and so are new connections."""

    def wall() -> float:
        actor = simulation.current
        offset = 0.0 if actor is None else actor.process.wall_offset_s
        return WALL_S + simulation.now + offset

    def fsync(handle: int) -> None:
        simulation.sleep(FSYNC_S * simulation.rng.random())

    names = random.Random(0)
    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", lambda: simulation.now),
        (time, "time", wall),
        (time, "sleep", simulation.sleep),
        (redis.retry, "sleep", simulation.sleep),
        (os, "fsync", fsync),
        (redis.connection, "UnixDomainSocketConnection", connection_class),
        (incarnations, "secrets", SimpleNamespace(token_hex=lambda nbytes: names.randbytes(nbytes).hex())),
        *COARSER,
        *_metrics_of_redis(),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
