"""Who holds what: the facts that an end by stalling must name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from leeway.messages import MessageError, Ticket, decode, decode_status
from leeway.streams import TICKETS_GROUP, Keys, now


def describe_tickets(client: redis.Redis, keys: Keys, limit: int = 6) -> str:
    """Tickets that are not answered: their ids, who has them, and since when there was no heartbeat for them.

    Never raises because of the server: a diagnosis must not hide what it is about.
    """
    try:
        pending: Any = client.xpending_range(keys.tickets, TICKETS_GROUP, "-", "+", limit)
        summary: Any = client.xpending(keys.tickets, TICKETS_GROUP)
        held = int(summary["pending"])
        waiting = int(client.xlen(keys.tickets)) - held
        beats = _heartbeats(client, keys)
        named = [_describe(client, keys, item, beats) for item in pending]
    except redis.RedisError as exc:
        if "NOGROUP" in str(exc):
            return "tickets: none was ever issued"
        return f"tickets: unknown, the server said: {exc}"
    more = f" and {held - len(named)} more" if held > len(named) else ""
    taken = f"{held} with samplers ({'; '.join(named)}{more})" if held else "none with a sampler"
    return f"tickets: {taken}, {waiting} that nobody took"


def _heartbeats(client: redis.Redis, keys: Keys) -> dict[str, float]:
    raw: Any = client.hgetall(keys.samplers)
    statuses = [decode_status(value) for value in raw.values()]
    return {status.sampler: status.heartbeat for status in statuses}


def _describe(client: redis.Redis, keys: Keys, item: Mapping[str, Any], beats: Mapping[str, float]) -> str:
    entries: Any = client.xrange(keys.tickets, item["message_id"], item["message_id"])
    try:
        name = decode(Ticket, entries[0][1]).header.ticket_id if entries else "(deleted)"
    except MessageError:
        name = "(unreadable)"
    owner = item["consumer"].decode()
    beat = f"{now() - beats[owner]:.0f} s ago" if owner in beats else "too long ago: it counts as lost"
    idle_s = item["time_since_delivered"] / 1000
    return (
        f"{name} with {owner}, handed out {item['times_delivered']} times, untouched for {idle_s:.0f} s, "
        f"last heartbeat of {owner} {beat}"
    )
