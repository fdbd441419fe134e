"""Injects the planned faults of one history where it can be interrupted: at its calls to the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from leeway_simulation.faults import CALL_FAULTS, LOSSES, REFUSALS, Fault
from leeway_simulation.network import Fate, Network
from leeway_simulation.scheduler import Process, Simulation
from leeway_simulation.server import Server, Unit

LOST_SHARE = 0.4
"""Share of the keys that a partial loss takes."""


@dataclass(frozen=True)
class Processes:
    """What faults do to processes."""

    start: Callable[[str, str], None]
    """Start one of a name and a role, besides those that run."""
    kill: Callable[[Process], None]


class Injection:
    """The faults of a history that have not happened yet, and what those that have were able to cause."""

    def __init__(
        self,
        simulation: Simulation,
        network: Network,
        server: Server,
        processes: Processes,
        faults: Sequence[Fault],
        log: Callable[[str], None],
    ) -> None:
        self.simulation, self.network, self.server = simulation, network, server
        self.processes, self.log = processes, log
        self.waiting = list(faults)
        self.silenced = 0
        """Samplers that may look dead because of a fault so far."""
        self._over = False
        network.before, network.after = self._before, self._after

    def stop(self) -> None:
        """No more faults."""
        self.waiting, self._over = [], True

    def lost_data(self) -> bool:
        """Whether the server has lost anything."""
        return any(self.network.happened[kind] for kind in LOSSES)

    # -- when --------------------------------------------------------------------------------------------

    def _before(self, number: int, process: Process, unit: Unit) -> tuple[Fate, float] | None:
        fault = self._due(number, process, after=False, transaction=unit[0][0] == "MULTI")
        if fault is None:
            return None
        self._note(fault, process)
        if fault.kind in CALL_FAULTS:
            return Fate(fault.kind), fault.seconds
        self._inject(fault, process)
        return None

    def _after(self, number: int, process: Process) -> None:
        fault = self._due(number, process, after=True, transaction=False)
        if fault is not None:
            self._note(fault, process)
            self._inject(fault, process)

    def _due(self, number: int, process: Process, *, after: bool, transaction: bool) -> Fault | None:
        """The first fault that is due at this call of `process`; it happens once."""
        for fault in self.waiting:
            if fault.call > number:
                return None
            late = fault.after and fault.kind not in CALL_FAULTS
            if late == after and fault.target in ("", process.name) and transaction >= fault.at_write:
                self.waiting.remove(fault)
                return fault
        return None

    def _note(self, fault: Fault, process: Process) -> None:
        self.network.happened[fault.kind] += 1
        self.silenced += fault.silences
        self.log(f"fault: {fault} [{process}]")

    # -- what --------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault, process: Process) -> None:
        server, network = self.server, self.network
        until = self.simulation.now + fault.seconds
        match fault.kind:
            case "pause":
                process.paused_until = until
            case "kill":
                self.processes.kill(process)
            case "partition":
                network.cut[process.name] = until
            case "flapping":
                network.flaps[process.name] = until
            case "clock jump":
                process.wall_offset_s += fault.seconds
            case "second":
                self._start_second(process)
            case "replaced":
                process.paused_until = until
                self._start_second(process)
            case "full loss":
                server.lose(server.keys())
                network.close_all()
            case "partial loss":
                self._lose_some(fault.pick)
            case "failover":
                self.simulation.at(until, partial(self._fail_over, server.snapshot()))
            case "outage":
                network.cut["*"] = until
            case "refusal":
                network.refusal = (until, REFUSALS[int(fault.pick * len(REFUSALS))])
            case "server clock jump":
                server.offset_s += fault.seconds

    def _start_second(self, process: Process) -> None:
        """Another one: of the same name where there is only one at a time, of a new name for samplers."""
        name = f"{process.name}-more" if process.role == "sampler" else process.name
        self.processes.start(name, process.role)

    def _lose_some(self, pick: float) -> None:
        keys = [key for i, key in enumerate(self.server.keys()) if (7 * pick + 0.618 * i) % 1 < LOST_SHARE]
        self.log(f"lost: {b', '.join(keys).decode()}")
        self.server.lose(keys)

    def _fail_over(self, snapshot: list[tuple[bytes, bytes]]) -> None:
        if not self._over:
            self.log("the replica takes over")
            self.server.restore(snapshot)
            self.network.close_all()
