"""Fences: which samplers take no tickets until they have loaded the newest weights.

    fence  -> the sampler sees it, drops its work, loads the newest version, attests it and reports the fence
              as passed
    lift   -> the controller has seen that; the sampler counts again

A sampler that is late goes on with what it is loading. One that attested something else discards its copy
and fetches the version in full: only a load that began after the fence passes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis

from leeway.statuses import FULL
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

    def fence(self, sampler: str, state: ControllerState, *, full: bool) -> None:
        """Fence a sampler until it has loaded the newest version of `state`; `full`: from a keyframe.

        Raises RedisUnavailable.
        """
        fence = f"{state.epoch}.{state.pending or state.current}.{int(1000 * now())}{FULL if full else ''}"
        self._retry(lambda: self.client.hset(self.keys.fences, sampler, fence), "fencing a sampler")
        self.active[sampler] = fence

    def lift(self, sampler: str) -> None:
        """Lift the fence of a sampler, if there is one. Raises RedisUnavailable."""
        if self.active.pop(sampler, None) is not None:
            self._retry(lambda: self.client.hdel(self.keys.fences, sampler), "lifting a fence")
