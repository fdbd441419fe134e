"""Who runs when: actors in virtual time, one at a time, in an order that the seed decides.

An actor is a thread that runs only while it has the turn. It gives the turn away where it waits: at a server
call, a sleep, the end of a write to disk, or the wait of an event loop. Whoever is due first in virtual time
has the next turn; nobody sleeps in real time.

    Simulation   the clock, who is due, callbacks at a time
    Process      a simulated process: a name, its actors, whether it is killed or paused
    Signal       what an actor can wait for
    Killed       unwinds the actors of a killed process; until they have ended, they reach nobody
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

EPSILON_S = 1e-6
"""Shortest wait, so that time never stands still."""


class Killed(BaseException):
    """The process of this actor was killed: nothing of it may have an effect any more."""


class SimulationError(Exception):
    """The simulation itself is at fault, not what it simulates."""


@dataclass(eq=False)
class Process:
    """A simulated process. `role`: trainer, controller or sampler; `number` counts the starts of a role."""

    name: str
    role: str
    number: int
    dead: bool = False
    paused_until: float = 0.0
    wall_offset_s: float = 0.0
    """How far the wall clock of its machine is off."""
    state: dict[str, Any] = field(default_factory=dict)
    """Values of module globals, which real processes do not share."""
    service: Any = None
    """The running service object, once it is built."""
    ended: bool = False
    error: BaseException | None = None
    """What `main` raised; None while it runs and when it returned."""

    def __str__(self) -> str:
        return f"{self.name}#{self.number}"


class Signal:
    """Wakes the actors that wait for it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Actor, int]] = []


class Actor:
    """A thread of a process. It runs `work` and hands the turn on when that has ended."""

    def __init__(self, process: Process, work: Callable[[], None]) -> None:
        self.process, self.work = process, work
        self.turn = threading.Lock()
        self.turn.acquire()
        self.token = 0
        """Counts its turns: a wake-up for an earlier wait does not count."""
        self.ended = False
        self.signalled = False


class _Worker(threading.Thread):
    """A thread that runs one actor after another, because threads are slow to start."""

    def __init__(self, pool: list[_Worker]) -> None:
        super().__init__(daemon=True)
        self.pool = pool
        self.job: Callable[[], None] = lambda: None
        self.begin = threading.Lock()
        self.begin.acquire()

    def run(self) -> None:
        while True:
            self.begin.acquire()
            self.job()


_idle: list[_Worker] = []


class Simulation:
    """One simulated history. `limit_s`: virtual seconds after which it ends whatever happens."""

    def __init__(
        self, seed: int | str, limit_s: float, switch: Callable[[Process | None, Process], None]
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.limit_s = limit_s
        self.current: Actor | None = None
        self.actors: list[Actor] = []
        self.problem: BaseException | None = None
        """What went wrong in the simulation itself."""
        self.over = False
        self._switch = switch
        self._last_process: Process | None = None
        self._due: list[tuple[float, int, Actor | None, int | Callable[[], None]]] = []
        self._number = 0
        self._finished = threading.Lock()
        self._finished.acquire()

    # -- from anywhere -----------------------------------------------------------------------------------

    @property
    def process(self) -> Process:
        """The process that has the turn."""
        if self.current is None:
            raise SimulationError("no actor has the turn")
        return self.current.process

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have `call` called at virtual time `when`, between two turns; it must not wait."""
        self._push(max(when, self.now), None, call)

    def start(self, process: Process, work: Callable[[], None]) -> Actor:
        """Start an actor of `process`; it gets its first turn soon."""
        actor = Actor(process, work)
        self.actors.append(actor)
        worker = _idle.pop() if _idle else None
        if worker is None:
            worker = _Worker(_idle)
            worker.start()
        worker.job = lambda: self._run(actor, worker)
        worker.begin.release()
        self._push(self.now + EPSILON_S, actor, actor.token)
        return actor

    def wake(self, signal: Signal) -> None:
        """Give everyone who waits for `signal` a turn."""
        waiting, signal.waiting = signal.waiting, []
        for actor, token in waiting:
            if actor.token == token and not actor.ended:
                actor.signalled = True
                self._push(self.now, actor, token)

    def kill(self, process: Process) -> None:
        """End a process at once. Its actors unwind before anyone else has a turn."""
        process.dead = True
        for actor in self.actors:
            if actor.process is process and not actor.ended and actor is not self.current:
                self._push(-1.0, actor, actor.token)

    def end(self) -> None:
        """No more turns for anyone after this one."""
        self.over = True

    # -- from the actor that has the turn ----------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of virtual time."""
        self.wait(seconds)

    def wait(self, seconds: float | None, signal: Signal | None = None) -> bool:
        """Wait until `signal`, or for `seconds`; whether the signal came. Raises Killed."""
        actor = self.current
        if actor is None:
            raise SimulationError("only an actor can wait")
        self._check_alive(actor)
        actor.token += 1
        actor.signalled = False
        if signal is not None:
            signal.waiting.append((actor, actor.token))
        if seconds is not None:
            self._push(self.now + max(seconds, EPSILON_S), actor, actor.token)
        self._hand_on(actor)
        self._check_alive(actor)
        return actor.signalled

    def run(self) -> None:
        """Give turns until the history is over; called by the thread that owns the simulation."""
        self._hand_on(None)
        if self.problem is not None:
            raise self.problem

    # -- turns -------------------------------------------------------------------------------------------

    def _push(self, when: float, actor: Actor | None, what: int | Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._due, (when, self._number, actor, what))

    @staticmethod
    def _check_alive(actor: Actor) -> None:
        if actor.process.dead:
            raise Killed(str(actor.process))

    def _next(self) -> Actor | None:
        """Whose turn it is; None when the history is over."""
        while self._due and not self.over:
            when, _, actor, what = heapq.heappop(self._due)
            if when > self.limit_s:
                self.over = True
                break
            if actor is None:
                self.now = max(self.now, when)
                self.current = None
                what()  # type: ignore[operator]
                continue
            if actor.ended or actor.token != what:
                continue
            process = actor.process
            if not process.dead and process.paused_until > max(when, self.now):
                self._push(process.paused_until, actor, actor.token)
                continue
            self.now = max(self.now, when)
            return actor
        if not self.over:
            self.problem = SimulationError("everyone waits for something that never comes")
            self.over = True
        # Unwind whoever is left, one after the other.
        for actor in self.actors:
            if not actor.ended:
                actor.process.dead = True
                return actor
        return None

    def _hand_on(self, actor: Actor | None) -> None:
        try:
            following = self._next()
        except BaseException as error:  # noqa: BLE001 (a callback failed: the history cannot go on)
            self.problem, self.over = error, True
            following = self._next()
        if following is None:
            self._finished.release()
            if actor is not None:
                return
        elif following is not actor:
            self._give_turn(following)
        else:
            self._take_turn(following)
            return
        if actor is None:
            self._finished.acquire()
        elif not actor.ended:
            actor.turn.acquire()

    def _take_turn(self, actor: Actor) -> None:
        self.current = actor
        if actor.process is not self._last_process:
            self._switch(self._last_process, actor.process)
            self._last_process = actor.process

    def _give_turn(self, actor: Actor) -> None:
        self._take_turn(actor)
        actor.turn.release()

    def _run(self, actor: Actor, worker: _Worker) -> None:
        actor.turn.acquire()
        try:
            if not actor.process.dead:
                actor.work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 (whatever it is, it must not be lost with the thread)
            self.problem, self.over = error, True
        actor.ended = True
        _idle.append(worker)
        self._hand_on(actor)
