"""Events: what a person wants to know about a run. Written and read here, by every service and the launcher.

The stream `events` is capped, because nobody has to read it; `leeway run` shows warnings and errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from leeway.messages import Event, EventHeader, EventLevel, decode
from leeway.streams import Keys, Tail, append, now, retrying

MAX_EVENTS = 10_000
STARTING = "starting"
"""Name of the event by which a service announces that it begins to load its engine."""


def write_event(
    client: redis.Redis,
    keys: Keys,
    *,
    source: str,
    name: str,
    text: str,
    level: EventLevel = "info",
    data: Mapping[str, Any] | None = None,
    budget_s: float = 60.0,
) -> None:
    """Append one event. `source`: the service, or the sampler's name. `name`: what happened, in snake case.

    Raises RedisUnavailable after `budget_s`.
    """
    header = EventHeader(level=level, source=source, name=name, text=text, data=dict(data or {}))
    append(client, keys.events, Event(header), maxlen=MAX_EVENTS, budget_s=budget_s)


class EventTail:
    """Reads the events of a run from its beginning, without taking them from other readers."""

    def __init__(self, client: redis.Redis, keys: Keys, *, budget_s: float = 60.0) -> None:
        self._tail = Tail(client, keys.events, budget_s=budget_s)

    def read(self, block_s: float | None = None) -> list[EventHeader]:
        """New events; waits up to `block_s` for the first (None: not at all). Raises MessageError."""
        return [decode(Event, entry.fields).header for entry in self._tail.read(block_s=block_s)]


def read_recent_events(
    client: redis.Redis, keys: Keys, within_s: float, *, budget_s: float
) -> list[EventHeader]:
    """Events of the last `within_s` seconds. Raises MessageError, RedisUnavailable."""
    since_ms = int(1000 * (now() - within_s))
    entries: Any = retrying(
        lambda: client.xrange(keys.events, min=since_ms), budget_s=budget_s, what="reading events"
    )
    return [decode(Event, fields).header for _, fields in entries]
