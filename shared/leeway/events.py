"""Events: what a person wants to know about a run. Written and read here, by every service and the launcher.

The stream `events` is capped, because nobody has to read it; `leeway run` shows warnings and errors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import redis

from leeway.messages import Event, EventHeader, EventLevel, decode
from leeway.streams import Keys, Tail, append, now, retrying

log = logging.getLogger(__name__)

MAX_EVENTS = 10_000
CONFIG_DIFFERS = "config_differs"
"""Name of the event of a service that meets another configuration (`leeway.config.identity`)."""
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


class EventWriter:
    """Writes the events of one service and logs them."""

    def __init__(self, client: redis.Redis, keys: Keys, source: str, *, budget_s: float) -> None:
        self.client, self.keys, self.source, self.budget_s = client, keys, source, budget_s

    def write(self, level: EventLevel, name: str, text: str, **data: object) -> None:
        """Log the text and append the event. Raises RedisUnavailable."""
        log.log(logging.getLevelName(level.upper()), text)
        write_event(
            self.client,
            self.keys,
            source=self.source,
            name=name,
            text=text,
            level=level,
            data=data,
            budget_s=self.budget_s,
        )


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
