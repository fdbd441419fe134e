"""The Redis server's memory, as the trainer reads it after each step."""

from __future__ import annotations

from leeway.metrics.metric import Metric

REDIS_MEMORY_MIB = Metric("redis/memory_mib", unit="MiB", help="Memory that the server uses.")
REDIS_MEMORY_FRACTION = Metric(
    "redis/memory_fraction", unit="share", help="Used memory over the server's limit."
)

METRICS = (REDIS_MEMORY_MIB, REDIS_MEMORY_FRACTION)
