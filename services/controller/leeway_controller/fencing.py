"""Fences: which samplers take no tickets until they have reloaded the weights.

    fence  -> the sampler sees it, drops its work, reloads the current version, attests it and
              reports the fence as passed
    lift   -> the controller has seen that; the sampler counts again

A fence is unique, so that a sampler cannot pass one by an earlier reload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis

from leeway.streams import Keys, now, retrying
from leeway_controller.state import ControllerState


class Fences:
    """The fences of a run, in its hash `fences`. `active`: sampler -> fence."""

    def __init__(self, client: redis.Redis, keys: Keys, *, budget_s: float) -> None:
        self.client, self.keys, self.budget_s = client, keys, budget_s
        raw = self._retry(lambda: client.hgetall(keys.fences), "reading fences")
        self.active: dict[str, str] = {name.decode(): fence.decode() for name, fence in raw.items()}

    def _retry(self, call: Callable[[], Any], what: str) -> Any:
        return retrying(call, budget_s=self.budget_s, what=what)

    def fence(self, sampler: str, state: ControllerState) -> None:
        """Fence a sampler until it has reloaded the newest version of `state`. Raises RedisUnavailable."""
        fence = f"{state.epoch}.{state.pending or state.current}.{int(1000 * now())}"
        self._retry(lambda: self.client.hset(self.keys.fences, sampler, fence), "fencing a sampler")
        self.active[sampler] = fence

    def lift(self, sampler: str) -> None:
        """Lift the fence of a sampler, if there is one. Raises RedisUnavailable."""
        if self.active.pop(sampler, None) is not None:
            self._retry(lambda: self.client.hdel(self.keys.fences, sampler), "lifting a fence")
