"""Diagnosis of a stalled run: when it counts as stalled, and which tickets are unanswered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from leeway.errors import LeewayError
from leeway.events import STARTING, read_recent_events, write_event
from leeway.incarnations import split_holder
from leeway.messages import MessageError, Ticket, decode
from leeway.statuses import read_statuses
from leeway.streams import TICKETS_GROUP, Keys, RedisUnavailable, now


def tell_start(client: redis.Redis, keys: Keys, service: str, budget_s: float) -> None:
    """Announce that `service` begins to load its engine, so that the others wait for it."""
    text = f"{service} is starting"
    write_event(client, keys, source=service, name=STARTING, text=text, budget_s=budget_s)


def is_stalled(client: redis.Redis, keys: Keys, silent_s: float, limit_s: float, start_s: float) -> bool:
    """Whether the run counts as stalled after `silent_s` seconds without progress.

    It does after `limit_s`, or, if a service has (re)started in the meantime, after `start_s` more. It does
    not while a sampler fetches weights, however long that takes.
    """
    if silent_s < limit_s or _anyone_fetches(client, keys, limit_s):
        return False
    return silent_s >= limit_s + start_s or not _anyone_started(client, keys, silent_s)


def _anyone_started(client: redis.Redis, keys: Keys, within_s: float) -> bool:
    try:
        events = read_recent_events(client, keys, within_s, budget_s=0.0)
        return any(event.name == STARTING for event in events)
    except (redis.RedisError, LeewayError):
        return False


def _anyone_fetches(client: redis.Redis, keys: Keys, within_s: float) -> bool:
    """Whether a part of a version reached a sampler in the last `within_s` seconds."""
    try:
        return any(now() - s.fetched_at < within_s for s in read_statuses(client, keys, budget_s=0.0))
    except (redis.RedisError, LeewayError):
        return False


def describe_tickets(client: redis.Redis, keys: Keys, limit: int = 6) -> str:
    """Unanswered tickets: their ids, which sampler has them, and the time since its last heartbeat for them.

    Names at most `limit` tickets. Never raises because of the server: that would hide what is diagnosed.
    """
    try:
        pending: Any = client.xpending_range(keys.tickets, TICKETS_GROUP, "-", "+", limit)
        summary: Any = client.xpending(keys.tickets, TICKETS_GROUP)
        held = int(summary["pending"])
        waiting = int(client.xlen(keys.tickets)) - held
        beats = _heartbeats(client, keys)
        named = [_describe(client, keys, item, beats) for item in pending]
    except (redis.RedisError, RedisUnavailable, MessageError) as exc:
        if "NOGROUP" in str(exc):
            return "tickets: none were issued"
        return f"tickets: unknown ({exc})"
    more = f" and {held - len(named)} more" if held > len(named) else ""
    taken = f"{held} in progress ({'; '.join(named)}{more})" if held else "none in progress"
    return f"tickets: {taken}, {waiting} queued"


def _heartbeats(client: redis.Redis, keys: Keys) -> dict[str, float]:
    statuses = read_statuses(client, keys, budget_s=0.0)
    return {status.sampler: status.heartbeat for status in statuses}


def _describe(client: redis.Redis, keys: Keys, item: Mapping[str, Any], beats: Mapping[str, float]) -> str:
    entries: Any = client.xrange(keys.tickets, item["message_id"], item["message_id"])
    try:
        name = decode(Ticket, entries[0][1]).header.ticket_id if entries else "(deleted)"
    except MessageError:
        name = "(unreadable)"
    owner = split_holder(item["consumer"].decode())[0]
    beat = f"{now() - beats[owner]:.0f} s ago" if owner in beats else "too long ago, it counts as lost"
    idle_s = item["time_since_delivered"] / 1000
    return (
        f"{name} at {owner}, delivered {item['times_delivered']} times, idle for {idle_s:.0f} s, "
        f"last heartbeat of {owner} {beat}"
    )
