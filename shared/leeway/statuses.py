"""The hash `samplers`: each sampler writes its status there, everybody else reads it here.

An entry is a heartbeat as well: a sampler whose entry is older than `sync.ticket_idle_s` counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import redis

from leeway.incarnations import queue_register
from leeway.messages import SamplerStatus, decode_status, encode_status
from leeway.streams import Keys, retrying, set_clock

FULL = ".full"
"""End of a fence that only a load from a keyframe passes (`leeway_controller.fencing`)."""


def write_status(
    client: redis.Redis, keys: Keys, status: SamplerStatus, *, budget_s: float, holder: str = ""
) -> None:
    """Write a sampler's heartbeat, and its `holder` (`leeway.incarnations`) if there is none.

    Raises RedisUnavailable.
    """
    raw = encode_status(status)

    def write(pipe: Any) -> None:
        pipe.hset(keys.samplers, status.sampler, raw)
        if holder:
            queue_register(pipe, keys, holder)

    _with_clock(client, write, budget_s, "writing the heartbeat")


def read_statuses(client: redis.Redis, keys: Keys, *, budget_s: float) -> list[SamplerStatus]:
    """The statuses of all samplers, silent ones included, by name. Raises MessageError, RedisUnavailable."""
    raw = _with_clock(client, lambda pipe: pipe.hgetall(keys.samplers), budget_s, "reading samplers")
    return sorted((decode_status(value) for value in raw.values()), key=lambda status: status.sampler)


def _with_clock(client: redis.Redis, queue: Callable[[Any], None], budget_s: float, what: str) -> Any:
    """The result of the first command that `queue` puts on a pipeline; sets the clock to the server's."""

    def execute() -> Any:
        with client.pipeline(transaction=False) as pipe:
            queue(pipe)
            pipe.time()
            *results, server_time = pipe.execute()
        set_clock(server_time)
        return results[0]

    return retrying(execute, budget_s=budget_s, what=what)


def remove_status(client: redis.Redis, keys: Keys, sampler: str, *, budget_s: float) -> None:
    """Remove the entry of a sampler that leaves or is lost. Raises RedisUnavailable."""
    retrying(lambda: client.hdel(keys.samplers, sampler), budget_s=budget_s, what="removing a sampler")


def split_live(
    statuses: Iterable[SamplerStatus], at: float, silence_s: float
) -> tuple[list[SamplerStatus], list[SamplerStatus]]:
    """(live, silent): the last heartbeat of a silent sampler is more than `silence_s` seconds before `at`.

    `at`: Unix time.
    """
    live: list[SamplerStatus] = []
    silent: list[SamplerStatus] = []
    for status in statuses:
        (live if at - status.heartbeat <= silence_s else silent).append(status)
    return live, silent
