"""All metrics by name: those of the areas of Leeway, and those that installed packages declare.

An installed package adds metrics with an entry point in group `leeway.metrics` that names a tuple of Metric:

    [project.entry-points."leeway.metrics"]
    theirs = "their_package.metrics:METRICS"
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from leeway.errors import UsageError
from leeway.metrics.metric import Metric, MetricFamily
from leeway.registry import Registry

AREAS: Registry[tuple[Metric, ...]] = Registry(
    "leeway.metrics", "leeway.metrics.areas", "METRICS", tuple, "metrics area"
)


@lru_cache(maxsize=1)
def all_metrics() -> Mapping[str, Metric]:
    """Name -> metric, by area. Raises UsageError for an entry that is no Metric, and for a duplicate name."""
    found: dict[str, Metric] = {}
    areas: dict[str, str] = {}
    for area, metrics in AREAS.items():
        for metric in metrics:
            if not isinstance(metric, Metric):
                raise UsageError(
                    f"metrics area {area!r}: expected leeway.metrics.Metric, got {type(metric).__name__} "
                    f"{metric!r}"
                )
            if metric in found:
                raise UsageError(
                    f"metric {str(metric)!r} is declared by both area {areas[metric]!r} and area {area!r}: "
                    "rename one of them"
                )
            found[metric], areas[metric] = metric, area
    return MappingProxyType(found)


def status_metrics() -> list[Metric]:
    """Metrics that `leeway status` shows, those with a column in the table's order first."""
    shown = [metric for metric in all_metrics().values() if metric.status]
    return sorted(shown, key=lambda metric: metric.column.place if metric.column else math.inf)


def find_metric(name: str) -> Metric | None:
    """The metric or the family that a name belongs to; None for a name that no area declares."""
    metrics = all_metrics()
    if name in metrics:
        return metrics[name]
    families = (metric for metric in metrics.values() if isinstance(metric, MetricFamily))
    return next((family for family in families if family.member(name) is not None), None)
