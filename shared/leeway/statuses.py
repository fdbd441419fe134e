"""The samplers' statuses: each sampler writes its own key, everybody else reads them here.

    samplers          set of names that were written since the controller last tidied up
    samplers:<name>   the status of one sampler, as JSON

A key per sampler lets the server's permissions keep a sampler from writing another one's status. A status is
a heartbeat as well: a sampler whose status is older than `sync.ticket_idle_s` counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import redis

from leeway.incarnations import queue_register
from leeway.messages import MessageError, SamplerStatus, decode_status, encode_status
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
        pipe.set(keys.sampler(status.sampler), raw)
        pipe.sadd(keys.samplers, status.sampler)  # each time: whoever tidies up may have been quicker
        if holder:
            queue_register(pipe, keys, holder)

    _with_clock(client, write, budget_s, "writing the heartbeat")


def read_statuses(client: redis.Redis, keys: Keys, *, budget_s: float) -> list[SamplerStatus]:
    """The statuses of all samplers, silent ones included, by name. Raises MessageError, RedisUnavailable."""
    found = _read(client, keys, budget_s)
    return [_decode(name, raw) for name, raw in sorted(found.items()) if raw is not None]


def _read(client: redis.Redis, keys: Keys, budget_s: float) -> dict[str, bytes | None]:
    """Name -> status as it is stored; None for a sampler that has left."""
    (listed,) = _with_clock(client, lambda pipe: pipe.smembers(keys.samplers), budget_s, "reading samplers")
    names = [name.decode() for name in listed]
    if not names:
        return {}
    raws = retrying(
        lambda: client.mget([keys.sampler(name) for name in names]),
        budget_s=budget_s,
        what="reading heartbeats",
    )
    return dict(zip(names, cast(Any, raws), strict=True))


def _decode(name: str, raw: bytes) -> SamplerStatus:
    status = decode_status(raw)
    if status.sampler != name:
        raise MessageError(f"sampler status: the status of {name!r} names sampler {status.sampler!r}")
    return status


def _with_clock(client: redis.Redis, queue: Callable[[Any], None], budget_s: float, what: str) -> list[Any]:
    """The results of the commands that `queue` puts on a pipeline; sets the clock to the server's."""

    def execute() -> list[Any]:
        with client.pipeline(transaction=False) as pipe:
            queue(pipe)
            pipe.time()
            *results, server_time = pipe.execute()
        set_clock(server_time)
        return results

    return retrying(execute, budget_s=budget_s, what=what)


def remove_status(client: redis.Redis, keys: Keys, sampler: str, *, budget_s: float) -> None:
    """Remove the status of a sampler that leaves or is lost. Raises RedisUnavailable."""
    retrying(lambda: client.delete(keys.sampler(sampler)), budget_s=budget_s, what="removing a sampler")


def forget_samplers(client: redis.Redis, keys: Keys, *, budget_s: float) -> list[str]:
    """Remove the names of samplers that have left, which a sampler may not do itself; returns the names.

    Raises RedisUnavailable.
    """
    gone = sorted(name for name, raw in _read(client, keys, budget_s).items() if raw is None)
    if gone:
        retrying(lambda: client.srem(keys.samplers, *gone), budget_s=budget_s, what="forgetting samplers")
    return gone


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
