"""Incarnations: every start of a sampler's process is one, and the newest of each sampler is known.

    start          registers the incarnation under the sampler's name, in place of the one before it
    heartbeat      registers it again, should the server have lost it
    left or gone   removed, by the sampler itself when it leaves, or by the controller when its pod is gone

A holder is written `sampler:incarnation`. It is dead once another incarnation of the sampler has started, or
the sampler is gone. One that is merely silent, because it is stopped or cut off, is not: it may come back.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import redis

from leeway.streams import Keys, retrying


def new_holder(sampler: str) -> str:
    """A holder for a new process of `sampler`."""
    return f"{sampler}:{secrets.token_hex(4)}"


def split_holder(holder: str) -> tuple[str, str]:
    """(sampler, incarnation); the incarnation of a bare name is empty."""
    sampler, separator, incarnation = holder.rpartition(":")
    return (sampler, incarnation) if separator else (holder, "")


def register(client: redis.Redis, keys: Keys, holder: str, *, budget_s: float) -> None:
    """A process of the sampler has started. Raises RedisUnavailable."""
    sampler, incarnation = split_holder(holder)
    retrying(
        lambda: client.hset(keys.incarnations, sampler, incarnation),
        budget_s=budget_s,
        what="registering a sampler",
    )


def queue_register(pipe: Any, keys: Keys, holder: str) -> None:
    """Queue the registration of a holder that the server may have lost."""
    sampler, incarnation = split_holder(holder)
    pipe.hsetnx(keys.incarnations, sampler, incarnation)


def forget_sampler(client: redis.Redis, keys: Keys, sampler: str, *, budget_s: float) -> None:
    """The sampler has left, or is known to be gone. Raises RedisUnavailable."""
    retrying(lambda: client.hdel(keys.incarnations, sampler), budget_s=budget_s, what="removing a sampler")


def read_incarnations(client: redis.Redis, keys: Keys, *, budget_s: float) -> dict[str, str]:
    """Sampler -> its newest incarnation. Raises RedisUnavailable."""
    raw: Any = retrying(
        lambda: client.hgetall(keys.incarnations), budget_s=budget_s, what="reading the incarnations"
    )
    return {name.decode(): incarnation.decode() for name, incarnation in raw.items()}


def is_dead(holder: str, newest: Mapping[str, str]) -> bool:
    """Whether a holder is known to be dead. `newest`: what `read_incarnations` found."""
    sampler, incarnation = split_holder(holder)
    return newest.get(sampler) != incarnation
