"""Times in a report: seconds by phase since the previous report, and other numbers measured since then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from leeway.metrics.areas.resync import VERDICT_SELF, WEIGHTS_WIRE_BYTES
from leeway.metrics.areas.time import TIME_PUBLISH_S, TIME_SCORE_S, TIME_STEP_S, TIME_TRAIN_S, TIME_WAIT_S
from leeway.metrics.areas.tokens import TOKENS
from leeway.metrics.areas.trainer import TRAINER_BUSY_FRACTION, TRAINER_TOKENS_PER_S

Metrics = dict[str, float]


class StepTimes:
    """Collects until the next step's report.

    The verdict, the publication and the checkpoint that follow step k are part of the report of step k + 1.
    """

    def __init__(self) -> None:
        self._values: Metrics = {}
        self._reported = time.monotonic()

    def set(self, name: str, value: float) -> None:
        """Give the next report a number."""
        self._values[name] = value

    def spent(self, name: str) -> float:
        """Seconds of phase `name` so far."""
        return self._values.get(name, 0.0)

    @contextmanager
    def spend(self, name: str) -> Iterator[None]:
        """Add the time inside to phase `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._values[name] = self.spent(name) + time.monotonic() - started

    def report(self, metrics: Metrics) -> Metrics:
        """`metrics` of a step with everything collected; collecting starts over."""
        now = time.monotonic()
        wall, self._reported = now - self._reported, now
        collected, self._values = self._values, {}
        busy = metrics[TIME_SCORE_S] + metrics[TIME_TRAIN_S]
        return {
            **metrics,
            VERDICT_SELF: 0.0,
            TIME_PUBLISH_S: 0.0,
            WEIGHTS_WIRE_BYTES: 0.0,
            **collected,
            TIME_STEP_S: wall,
            TRAINER_TOKENS_PER_S: metrics[TOKENS] / max(busy, 1e-9),
            TRAINER_BUSY_FRACTION: 1.0 - min(1.0, collected.get(TIME_WAIT_S, 0.0) / max(wall, 1e-9)),
        }
