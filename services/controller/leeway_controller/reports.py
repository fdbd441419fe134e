"""The stream `reports` as the controller reads it: each report is answered once, by the leader.

read   -> new reports, and those that a replaced controller took and did not answer
answer -> acknowledged in the MULTI of the answer; the stream keeps the last REPORTS_KEPT answered ones
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import redis

from leeway.streams import REPORTS_GROUP, Consumer, Entry, Keys
from leeway_controller.state import ControllerState
from leeway_controller.store import Effects, StateStore

CLAIM_EVERY_S = 2.0
REPORTS_KEPT = 10_000
"""Answered reports that stay in the stream, for the launcher and other readers."""


class ReportReader:
    """Reads and acknowledges reports. `name`: of this consumer."""

    def __init__(self, client: redis.Redis, keys: Keys, name: str, *, budget_s: float) -> None:
        self.keys = keys
        self.consumer = Consumer(client, keys.reports, REPORTS_GROUP, name, budget_s=budget_s)
        self._answered: deque[bytes] = deque(maxlen=REPORTS_KEPT)
        self._claimed_at = float("-inf")

    def read(self, block_s: float) -> list[Entry]:
        """Reports to answer; waits up to `block_s` for the first."""
        return [*self._left_behind(), *self.consumer.read(100, block_s)]

    def _left_behind(self) -> list[Entry]:
        """Reports that an older controller took and did not answer: at the start, and every CLAIM_EVERY_S,
        since it may have taken one while it was being replaced.
        """
        first, now_s = self._claimed_at < 0, time.monotonic()
        if now_s - self._claimed_at < CLAIM_EVERY_S:
            return []
        self._claimed_at = now_s
        return self.consumer.claim_stale(0.0 if first else CLAIM_EVERY_S, 1000)

    def answer(
        self, entry: Entry, store: StateStore, state: ControllerState, effects: Effects = lambda pipe: None
    ) -> None:
        """Commit `state` and `effects` together with the acknowledgement of the report."""

        def with_ack(pipe: Any) -> None:
            effects(pipe)
            self.consumer.queue_ack(pipe, [entry.id], delete=False)
            if len(self._answered) == REPORTS_KEPT:
                pipe.xtrim(self.keys.reports, minid=self._answered[0], approximate=False)

        store.commit(state, with_ack)
        self.consumer.forget([entry.id])
        self._answered.append(entry.id)
