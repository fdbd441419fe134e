"""Many histories, and what came of them; a history that breaks is reduced to the faults that it takes."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from leeway_host.redis_server import EmbeddedRedis
from leeway_simulation.faults import Fault, plan_faults
from leeway_simulation.history import History, Outcome
from leeway_simulation.server import Server

SCHEDULES = 6
"""Orders of steps that are tried when a history is reduced."""


@dataclass
class Campaign:
    """The sum of the histories that were run."""

    histories: int = 0
    broken: list[Outcome] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    """Faults that had something to hit, by kind."""
    calls: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count a history."""
        self.histories += 1
        self.happened += outcome.happened
        self.calls += outcome.calls
        self.virtual_s += outcome.virtual_s
        if outcome.problems:
            self.broken.append(outcome)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        count = max(1, self.histories)
        return {
            "histories": self.histories,
            "violations": [{"seed": o.seed, "problems": o.problems} for o in self.broken],
            "faults": dict(sorted(self.happened.items())),
            "calls": self.calls,
            "virtual_s": round(self.virtual_s),
            "cpu_s_per_history": round(self.cpu_s / count, 3),
            "wall_s_per_history": round(self.wall_s / count, 3),
        }


@contextmanager
def simulated_server() -> Iterator[Server]:
    """A server of its own; the services' logs, which tell of every fault, are left out."""
    logging.disable(logging.CRITICAL)
    before, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None  # coroutines of killed samplers
    try:
        with EmbeddedRedis() as embedded:
            yield Server(embedded.url)
            gc.collect()
    finally:
        sys.unraisablehook = before
        logging.disable(logging.NOTSET)


def run_history(
    server: Server, seed: int, faults: Sequence[Fault] | None = None, schedule: int = 0
) -> Outcome:
    """The history of `seed`, with its own faults or with `faults`; `schedule`: another order of steps."""
    return History(server, seed, plan_faults(seed) if faults is None else faults, schedule).run()


def run_histories(
    server: Server, seeds: Iterable[int], most_broken: int, tell: Callable[[Campaign, Outcome], None]
) -> Campaign:
    """Run the histories of `seeds`, until `most_broken` broke; `tell` is called after each."""
    campaign = Campaign()
    cpu, wall = time.process_time(), time.monotonic()
    for seed in seeds:
        outcome = run_history(server, seed)
        campaign.add(outcome)
        campaign.cpu_s, campaign.wall_s = time.process_time() - cpu, time.monotonic() - wall
        tell(campaign, outcome)
        if len(campaign.broken) >= most_broken:
            break
    return campaign


def shrink(server: Server, broken: Outcome) -> Outcome:
    """The same history without the faults that it breaks without.

    Without a fault everything after it happens at other moments, so that a few orders of steps are tried.
    """
    smallest = broken
    for fault in broken.faults:
        fewer = [other for other in smallest.faults if other is not fault]
        for schedule in range(SCHEDULES):
            outcome = run_history(server, broken.seed, fewer, schedule)
            if outcome.problems:
                smallest = outcome
                break
    return smallest
