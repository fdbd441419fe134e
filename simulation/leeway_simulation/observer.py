"""What every executed command is checked for, and the history of reports as the server saw it.

a guarded write of a trainer     its run epoch must be the newest                          (invariant 11)
a guarded write of a controller  its term must be the newest
a mark on a suspected ticket     enough samplers must have died or fallen silent           (invariant 13)
a loss that a trainer found      the server must have lost something                       (invariant 8)
a report                         recorded, whether or not the server loses it later
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leeway.config import RunConfig
from leeway.messages import Event, Report, ReportHeader, decode
from leeway.streams import EPOCH_FIELD, OWNER_FIELD, STATE_FIELD, TERM_FIELD, Keys
from leeway_sampler.suspects import ALONE
from leeway_simulation.scheduler import Process
from leeway_simulation.server import Command, Server, Unit, target, text

CHECKED = frozenset(("XADD", "XDEL", "XACK", "HSET"))


def effects(unit: Unit, replies: list[Any]) -> Unit:
    """The commands of a unit that had an effect: none of a transaction that was not executed."""
    if unit[0][0] == "MULTI":
        done = replies[-1] is not None and not isinstance(replies[-1], Exception)
        return unit[1:-1] if done and unit[-1][0] == "EXEC" else []
    return [c for c, reply in zip(unit, replies, strict=True) if not isinstance(reply, Exception)]


class Observer:
    """Watches one history. `lost_samplers()`: how many samplers have died or fallen silent so far.

    `lost_data()`: whether the server has lost anything.
    """

    def __init__(
        self,
        server: Server,
        keys: Keys,
        config: RunConfig,
        problem: Callable[[str], None],
        lost_samplers: Callable[[], int],
        lost_data: Callable[[], bool],
    ) -> None:
        self.server, self.keys, self.config = server, keys, config
        self.problem, self.lost_samplers, self.lost_data = problem, lost_samplers, lost_data
        self.reports: list[ReportHeader] = []
        self._known: set[tuple[int, str, int]] = set()
        self._newest = -1

    def executed(self, process: Process, unit: Unit, replies: list[Any]) -> None:
        """A unit of `process` was executed."""
        if not any(command[0] in CHECKED for command in unit):
            return
        done = effects(unit, replies)
        if process.role == "trainer":
            self._check_trainer(process, done)
        elif process.role == "controller":
            self._check_controller(process, done)
        for command in done:
            if target(command) == ("XADD", self.keys.reports):
                self._record(command)
            elif target(command) == ("XADD", self.keys.events):
                self._check_loss(process, command)
            elif target(command) == ("HSET", self.keys.suspects) and text(command[3]).startswith(ALONE):
                self._check_suspect(process, text(command[2]))

    # -- reports -----------------------------------------------------------------------------------------

    def _record(self, command: Command) -> None:
        header = decode(Report, _fields(command)).header
        key = (header.epoch, header.event, header.step)
        if key in self._known or header.epoch < self._newest:
            return  # a repeat, or of a trainer that was replaced: readers go by the epoch
        self._known.add(key)
        if header.event == "started":
            self._newest = header.epoch
        self.reports.append(header)

    # -- authority ---------------------------------------------------------------------------------------

    def _check_trainer(self, process: Process, done: Unit) -> None:
        written = [command for command in done if target(command) in self._guarded_of_trainer()]
        epoch = getattr(getattr(process.service, "epoch", None), "number", None)
        if not written or epoch is None:
            return
        newest, owner = int(self._state(EPOCH_FIELD) or -1), self._state(OWNER_FIELD)
        if newest > epoch or (newest == epoch and text(owner) != str(process)):
            self.problem(
                f"{process} of run epoch {epoch} has written {_brief(written[0])} although epoch {newest} of "
                f"{text(owner)} had begun"
            )

    def _guarded_of_trainer(self) -> set[tuple[str, str]]:
        keys = self.keys
        return {
            ("XADD", keys.weights),
            ("XDEL", keys.weights),
            ("XACK", keys.rollouts),
            ("XDEL", keys.rollouts),
        }

    def _check_controller(self, process: Process, done: Unit) -> None:
        keys = self.keys
        written = [
            command
            for command in done
            if target(command) in {("XADD", keys.verdicts), ("XADD", keys.tickets)}
            or (command[0] == "HSET" and STATE_FIELD in map(text, command[2:4]))
        ]
        begins = any(TERM_FIELD in map(text, command[2:4]) for command in done)
        store = getattr(process.service, "store", None)
        if not written or begins or store is None:
            return
        newest = int(self._state(TERM_FIELD) or 0)
        if newest > store.term:
            self.problem(
                f"{process} of term {store.term} has written {_brief(written[0])} although term {newest} had "
                "begun"
            )

    def _state(self, field: str) -> Any:
        return self.server.admin.execute([("HGET", self.keys.state, field)])[0]

    # -- losses ------------------------------------------------------------------------------------------

    def _check_loss(self, process: Process, command: Command) -> None:
        event = decode(Event, _fields(command)).header
        if event.name == "streams_lost" and not self.lost_data():
            self.problem(f"{process}: something is lost, but not by the server: {event.text}")

    # -- deliveries --------------------------------------------------------------------------------------

    def _check_suspect(self, process: Process, ticket: str) -> None:
        lost, least = self.lost_samplers(), self.config.sampler.max_deliveries - 1
        if lost < least:
            self.problem(
                f"{process} draws ticket {ticket} alone as if {least} samplers had died with it; {lost} have"
            )


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _fields(command: Command) -> dict[bytes, bytes]:
    """The fields of an entry that XADD writes: those of a message without arrays, which has one."""
    return {_bytes(command[-2]): _bytes(command[-1])}


def _brief(command: Command) -> str:
    return " ".join(text(part) for part in command[:2])
