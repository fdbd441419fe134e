"""The faults of one history: planned as a pure function of the seed, due at a number of server calls.

A plan is a list of faults that do not depend on each other, so that any of them can be left out; `shrink.py`
looks for the few that break a history.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leeway_simulation.network import Fate

CALLS = 500
"""Server calls of an undisturbed history, about: faults are due within them."""
MOST_FAULTS = 6
MOST_SILENCES = 2
"""Samplers that may die or fall silent in one history: fewer than sampler.max_deliveries, so that no ticket
can be the suspected cause."""
SAMPLERS = 2
TARGETS = ("trainer", "controller", *(f"sampler-{i}" for i in range(SAMPLERS)))
SECONDS = (0.5, 3.0, 7.0, 15.0, 40.0)
"""Durations: the last two exceed every timeout of the simulated configuration."""
CALL_FAULTS = tuple(fate.value for fate in Fate)
PROCESS_FAULTS = ("pause", "kill", "partition", "clock jump", "second", "replaced", "flapping")
SERVER_FAULTS = ("full loss", "partial loss", "failover", "outage", "refusal", "server clock jump")
LOSSES = ("full loss", "partial loss", "failover")
KINDS = (*CALL_FAULTS, *PROCESS_FAULTS, *SERVER_FAULTS)
REFUSALS = (
    "OOM command not allowed when used memory > 'maxmemory'.",
    "READONLY You can't write against a read only replica.",
    "MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "NOREPLICAS Not enough good replicas to write.",
    "LOADING Valkey is loading the dataset in memory",
    "CLUSTERDOWN The cluster is down",
)


@dataclass(frozen=True)
class Fault:
    """One fault, due at the call number `call` of all processes together.

    `target`: a process; "" for the server. `seconds`: how long it lasts, or how far a clock jumps. `pick` in
    [0, 1): what of several things is hit. `after`: after the call was executed rather than before.
    `at_write`: at the next transaction of the target, between its check and its effects.
    """

    kind: str
    call: int
    target: str = ""
    seconds: float = 0.0
    pick: float = 0.0
    after: bool = False
    at_write: bool = False

    def __str__(self) -> str:
        words = [f"call {self.call}{' (after it)' if self.after else ''}: {self.kind}"]
        words += [f"of {self.target}"] if self.target else []
        words += ["at its next transaction"] if self.at_write else []
        words += (
            [f"{self.seconds:+g} s" if "clock" in self.kind else f"{self.seconds:g} s"]
            if self.seconds
            else []
        )
        words += [f"pick {self.pick:.3f}"] if self.kind in ("partial loss", "refusal") else []
        return " ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(self.__dict__)

    @property
    def silences(self) -> int:
        """How many samplers may look dead because of it."""
        if self.kind in ("outage", "full loss", "partial loss", "failover", "refusal"):
            return SAMPLERS if self.seconds > SECONDS[1] else 0
        long = self.kind == "kill" or (
            self.kind in ("pause", "replaced", "partition") and self.seconds > SECONDS[1]
        )
        return int(self.target.startswith("sampler") and self.kind in PROCESS_FAULTS and long)


def plan_faults(seed: int, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """The faults of history `seed`, in the order in which they are due."""
    rng = random.Random(f"faults/{seed}")
    faults: list[Fault] = []
    silences = 0
    for _ in range(rng.randint(1, MOST_FAULTS)):
        kind = rng.choice(kinds)
        target = "" if kind in SERVER_FAULTS else rng.choice(TARGETS)
        seconds = rng.choice(SECONDS)
        if kind in ("clock jump", "server clock jump"):
            seconds = rng.choice((-1, 1)) * seconds
        elif kind in ("kill", "second", "full loss", "partial loss") or (
            kind in CALL_FAULTS and kind != Fate.DELAYED.value
        ):
            seconds = 0.0
        at_write = kind in PROCESS_FAULTS and rng.random() < 0.5
        after = not at_write and rng.random() < 0.5
        pick = round(rng.random(), 4)
        fault = Fault(kind, rng.randint(1, CALLS), target, seconds, pick, after, at_write)
        if silences + fault.silences <= MOST_SILENCES:
            silences += fault.silences
            faults.append(fault)
    return sorted(faults, key=lambda fault: fault.call)
