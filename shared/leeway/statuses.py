"""The hash `samplers`: each sampler writes its status there, everybody else reads it here.

An entry is a heartbeat as well: a sampler whose entry is older than `sync.ticket_idle_s` counts as lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import redis

from leeway.messages import SamplerStatus, decode_status, encode_status
from leeway.streams import Keys, retrying


def write_status(client: redis.Redis, keys: Keys, status: SamplerStatus, *, budget_s: float) -> None:
    """Write a sampler's heartbeat. Raises RedisUnavailable."""
    raw = encode_status(status)
    retrying(
        lambda: client.hset(keys.samplers, status.sampler, raw),
        budget_s=budget_s,
        what="writing the heartbeat",
    )


def read_statuses(client: redis.Redis, keys: Keys, *, budget_s: float) -> list[SamplerStatus]:
    """The statuses of all samplers, silent ones included, by name. Raises MessageError, RedisUnavailable."""
    raw: Any = retrying(lambda: client.hgetall(keys.samplers), budget_s=budget_s, what="reading samplers")
    return sorted((decode_status(value) for value in raw.values()), key=lambda status: status.sampler)


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
