"""The samplers of a run: who joined, who is lost, who is fenced.

heartbeat in time   -> live; the first one is announced
heartbeat overdue   -> lost: its status and its fence are removed, other samplers claim its tickets
pod or process gone -> lost at once (`lost`, called from another thread)
"""

from __future__ import annotations

import queue

import redis

from leeway.events import EventWriter
from leeway.incarnations import forget_sampler
from leeway.messages import SamplerStatus
from leeway.statuses import read_statuses, remove_status, split_live
from leeway.streams import Keys, now
from leeway_controller.fencing import Fences
from leeway_controller.state import ControllerState


class SamplerRoster:
    """Who is there. `silence_s`: a sampler without a heartbeat for this long is lost."""

    def __init__(
        self, client: redis.Redis, keys: Keys, events: EventWriter, *, silence_s: float, budget_s: float
    ) -> None:
        self.client, self.keys, self.events = client, keys, events
        self.silence_s, self.budget_s = silence_s, budget_s
        self.fences = Fences(client, keys, budget_s=budget_s)
        self._joined: set[str] = set()
        self._last_heartbeats: dict[str, float] = {}
        """Unix times of samplers that went silent and have not come back."""
        self._losses: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def lost(self, sampler: str, why: str) -> None:
        """A sampler is known to be gone. Safe to call from any thread; the next `poll` acts on it."""
        self._losses.put((sampler, why))

    def statuses(self) -> list[SamplerStatus]:
        """The statuses of all samplers, as they are stored. Raises MessageError, RedisUnavailable."""
        return read_statuses(self.client, self.keys, budget_s=self.budget_s)

    def poll(self) -> list[SamplerStatus]:
        """The live samplers, after those that are lost were removed and new ones announced."""
        self._remove_losses()
        live, silent = split_live(self.statuses(), now(), self.silence_s)
        for status in silent:
            self._remove_silent(status)
        for status in live:
            self._last_heartbeats.pop(status.sampler, None)
            if status.sampler not in self._joined:
                self._joined.add(status.sampler)
                self.events.write("info", "sampler_joined", f"sampler {status.sampler} joined")
        return live

    def _remove_losses(self) -> None:
        while not self._losses.empty():
            name, why = self._losses.get()
            forget_sampler(self.client, self.keys, name, budget_s=self.budget_s)
            if name in self._joined:
                self.events.write("warning", "sampler_lost", f"sampler {name}: {why}", sampler=name)
                self._remove(name)

    def _remove_silent(self, status: SamplerStatus) -> None:
        name = status.sampler
        self.events.write(
            "warning",
            "sampler_lost",
            f"sampler {name} has sent no heartbeat for {now() - status.heartbeat:.0f} s "
            f"({status.inflight} responses in flight); other samplers take its tickets",
            sampler=name,
        )
        self._remove(name)
        self.fences.lift(name)
        self._last_heartbeats[name] = status.heartbeat

    def _remove(self, sampler: str) -> None:
        remove_status(self.client, self.keys, sampler, budget_s=self.budget_s)
        self._joined.discard(sampler)

    def fence(self, sampler: str, state: ControllerState, reason: str, *, full: bool) -> None:
        """Fence a sampler and announce why. `full`: it has to load the weights from a keyframe."""
        self.fences.fence(sampler, state, full=full)
        self.events.write(
            "warning",
            "sampler_fenced",
            f"sampler {sampler} {reason}: it gets no tickets until it has loaded the weights",
            sampler=sampler,
        )

    def readmit(self, sampler: str) -> None:
        """Lift the fence of a sampler that has loaded the weights, and announce it."""
        self.fences.lift(sampler)
        self.events.write("info", "sampler_rejoined", f"sampler {sampler} has loaded the weights")

    def describe(self) -> str:
        """All samplers in one line, for a diagnosis."""
        known = ", ".join(
            f"{s.sampler} (version {s.version}, {s.inflight} in flight, "
            f"heartbeat {now() - s.heartbeat:.0f} s ago)"
            for s in self.statuses()
        )
        lost = ", ".join(
            f"{name} (last heartbeat {now() - heartbeat:.0f} s ago)"
            for name, heartbeat in self._last_heartbeats.items()
        )
        return f"samplers: {known or 'none'}; lost: {lost or 'none'}"
