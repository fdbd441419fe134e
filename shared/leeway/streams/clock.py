"""The clock that heartbeats are written and judged by."""

from __future__ import annotations

import time


def now() -> float:
    """Unix time in seconds."""
    return time.time()
