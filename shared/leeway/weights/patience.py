"""A budget that progress renews: for work whose length depends on its size."""

from __future__ import annotations

import time

from leeway.streams import now
from leeway.weights.manifest import WeightsError


class FetchCancelled(WeightsError):
    """Whoever waited for a version does not want it any more."""


class Patience:
    """`seconds`: how long the work may make no progress. May be cancelled from another thread."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since = time.monotonic()
        self._cancelled = False
        self.renewed_at = 0.0
        """Unix time of the last progress, by the server's clock; 0 before the first."""

    @property
    def left_s(self) -> float:
        """Seconds until `check` raises, unless there is progress."""
        return max(0.0, self._since + self.seconds - time.monotonic())

    def renew(self) -> None:
        """There was progress."""
        self._since, self.renewed_at = time.monotonic(), now()

    def cancel(self) -> None:
        """Let the next `check` raise FetchCancelled."""
        self._cancelled = True

    def check(self, what: str) -> None:
        """Raise TimeoutError that names `what` when there was no progress for too long, or FetchCancelled."""
        if self._cancelled:
            raise FetchCancelled(f"{what}: cancelled")
        if not self.left_s:
            raise TimeoutError(f"{what}: no progress for {self.seconds:g} s")
