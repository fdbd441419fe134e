"""The clock that heartbeats are written and judged by: the server's.

Machines of a cluster may disagree about the time; what all services share is the server. Every read and
write of heartbeats asks it, in between the monotonic clock counts on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

_followed = time.time(), time.monotonic()
"""Unix time at some moment, and the reading of the monotonic clock at that moment."""


def now() -> float:
    """Unix time in seconds by the clock of the Redis server that this process talked to last."""
    unix, monotonic = _followed
    return unix + time.monotonic() - monotonic


def set_clock(server_time: Sequence[int]) -> None:
    """Follow the server's clock. `server_time`: the answer to TIME, in seconds and microseconds."""
    global _followed
    seconds, microseconds = server_time
    _followed = seconds + 1e-6 * microseconds, time.monotonic()
