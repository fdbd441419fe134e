"""Times in a report: seconds by phase since the previous report, and other numbers measured since then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
        busy = metrics["time/score_s"] + metrics["time/train_s"]
        return {
            **metrics,
            "verdict/self": 0.0,
            "time/publish_s": 0.0,
            "weights/wire_bytes": 0.0,
            **collected,
            "time/step_s": wall,
            "trainer/tokens_per_s": metrics["tokens"] / max(busy, 1e-9),
            "trainer/busy_fraction": 1.0 - min(1.0, collected.get("time/wait_s", 0.0) / max(wall, 1e-9)),
        }
