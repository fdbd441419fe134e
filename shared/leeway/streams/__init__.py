"""Redis streams as Leeway uses them: the one adapter that every service shares.

keys.py      names of a run's streams, keys, groups and of the fields of its hash `state`
client.py    a client that answered a PING
retry.py     a call repeated while the server is away, within a budget
writing.py   `append`: writes an entry
authority.py writes of the trainer, while it is the newest one of the run
clock.py     the server's clock
consumer.py  `Consumer`: reads a stream through a consumer group; acknowledges after the effect
tail.py      `Tail`: reads a stream from a position, without a group (fan-out)
entries.py   what a read returns
tidy.py      removes consumers that have left

All of it survives a lost connection: a read whose reply was lost is found again among the consumer's own
pending entries; a write is repeated, and its reader drops duplicates by the message's identity.
"""

from leeway.streams.authority import (
    SupersededError,
    check_epoch,
    newest_epoch,
    newest_start,
    process_id,
    write_in_epoch,
)
from leeway.streams.client import RedisRefused, client_name, connect, replica_url
from leeway.streams.clock import now, set_clock
from leeway.streams.consumer import Consumer, Stale
from leeway.streams.entries import Entry
from leeway.streams.keys import (
    CONFIG_FIELD,
    CONTROLLER_CONFIG_FIELD,
    EPOCH_FIELD,
    KEYFRAME_FIELD,
    MANUAL_FIELD,
    OWNER_FIELD,
    PUBLISHED_FIELD,
    REPORTS_GROUP,
    ROLLOUTS_GROUP,
    SCALE_FIELD,
    STATE_FIELD,
    TERM_FIELD,
    TICKETS_GROUP,
    Keys,
)
from leeway.streams.retry import LOST, RedisUnavailable, retrying
from leeway.streams.tail import Tail
from leeway.streams.tidy import remove_idle_consumers
from leeway.streams.writing import add_fields, append

__all__ = [
    "CONFIG_FIELD",
    "CONTROLLER_CONFIG_FIELD",
    "EPOCH_FIELD",
    "KEYFRAME_FIELD",
    "LOST",
    "MANUAL_FIELD",
    "OWNER_FIELD",
    "PUBLISHED_FIELD",
    "REPORTS_GROUP",
    "ROLLOUTS_GROUP",
    "SCALE_FIELD",
    "STATE_FIELD",
    "TERM_FIELD",
    "TICKETS_GROUP",
    "Consumer",
    "Entry",
    "Keys",
    "RedisRefused",
    "RedisUnavailable",
    "Stale",
    "SupersededError",
    "Tail",
    "add_fields",
    "append",
    "check_epoch",
    "client_name",
    "connect",
    "newest_epoch",
    "newest_start",
    "now",
    "process_id",
    "remove_idle_consumers",
    "replica_url",
    "retrying",
    "set_clock",
    "write_in_epoch",
]
