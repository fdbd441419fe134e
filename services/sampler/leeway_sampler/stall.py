"""StallClock: how long the engine has had requests without drawing a token.

It counts only time that this process has lived through: after a pause of the whole machine or of the
process, the engine gets its time again.
"""

from __future__ import annotations


class StallClock:
    """`limit_s`: seconds without a token after which the engine counts as hung.

    `first_s`: the same before its first token ever, when kernels may still be compiled. `step_s`: what one
    look may add at most.
    """

    def __init__(self, limit_s: float, first_s: float, step_s: float) -> None:
        self._limit_s, self._first_s, self._step_s = limit_s, max(limit_s, first_s), step_s
        self._seen_at: float | None = None
        self._drawn = 0
        self.silent_s = 0.0
        """Seconds since the last token while there were requests."""

    def look(self, at: float, *, drawn: int, inflight: int, pausing: bool) -> None:
        """Look at the engine at time.monotonic() `at`.

        `drawn`: tokens that it has drawn so far; `inflight`: its requests; `pausing`: generation is
        paused for new weights, which has a budget of its own.
        """
        step_s = 0.0 if self._seen_at is None else min(at - self._seen_at, self._step_s)
        if drawn != self._drawn or not inflight:
            self.silent_s = 0.0
        elif not pausing:
            self.silent_s += step_s
        self._seen_at, self._drawn = at, drawn

    @property
    def limit_s(self) -> float:
        """The limit that holds now."""
        return self._limit_s if self._drawn else self._first_s

    @property
    def hung(self) -> bool:
        """Whether the engine counts as hung."""
        return self.silent_s > self.limit_s
