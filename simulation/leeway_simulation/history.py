"""One simulated history: the services, what happens to them, how it must end, and what must hold of it.

start      a controller, a trainer, samplers
faults     each at its call (faults.py); what has ended is started again, as the launcher does
finished   the trainer has returned: the others are told to stop, and must end
check      the reports, by the checks of `leeway chaos`; what the observer saw; how processes ended
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from leeway.batches import plan_batch, prompts_digest
from leeway.checkpoints.find import read_latest
from leeway.config import RunConfig
from leeway.streams import Keys, RedisUnavailable, SupersededError
from leeway_controller.store import DeposedError
from leeway_host.launch.history import ExpectedDigest, check_reports
from leeway_simulation.faults import SAMPLERS, Fault
from leeway_simulation.injection import Injection, Processes
from leeway_simulation.loop import count_from_zero
from leeway_simulation.network import Network, SimulatedConnection
from leeway_simulation.observer import Observer
from leeway_simulation.patches import switch, virtual_time
from leeway_simulation.scheduler import Killed, Process, Simulation, SimulationError
from leeway_simulation.server import Server
from leeway_simulation.services import ITEMS, MAINS, RUN, Place, encode_item, simulated_config, stop

LIMIT_S = 1500.0
"""Virtual seconds after which a history counts as endless."""
RESTART_S = 2.0
STOP_S = 120.0
"""Virtual seconds that services may take to stop."""
EXPECTED = (RedisUnavailable, SupersededError, DeposedError)
"""Errors that a process may end with; the launcher or Kubernetes starts it again."""


@dataclass
class Outcome:
    """How a history ended. `problems` is empty if everything held."""

    seed: int
    faults: list[Fault]
    problems: list[str]
    happened: Counter[str]
    """Faults that had something to hit, by kind."""
    calls: int = 0
    virtual_s: float = 0.0
    log: list[str] = field(default_factory=list)


class History:
    """See the module's docstring."""

    def __init__(self, server: Server, seed: int, faults: Sequence[Fault], schedule: int = 0) -> None:
        self.server = server
        self.simulation = Simulation(f"{seed}/{schedule}" if schedule else seed, LIMIT_S, switch)
        self.network = Network(self.simulation, server)
        self.config: RunConfig = simulated_config(seed)
        self.outcome = Outcome(seed, list(faults), [], self.network.happened)
        self.processes: list[Process] = []
        self.stopping = False
        self.out = Path(tempfile.mkdtemp(prefix="leeway-simulation-", dir=_memory()))
        self.place = Place(self.simulation, self.config, self.out, self.problem)
        self.injection = Injection(
            self.simulation, self.network, server, Processes(self._start, self._kill), faults, self.log
        )
        self.ended_samplers = 0
        """Samplers that gave up."""
        self.observer = Observer(
            server,
            Keys(RUN),
            self.config,
            self.problem,
            lambda: self.injection.silenced + self.ended_samplers,
            self.injection.lost_data,
        )

    def run(self) -> Outcome:
        """Run to the end and check."""
        SimulatedConnection.network = self.network
        count_from_zero()
        self.server.begin(self.simulation, self.observer.executed)
        collects = gc.isenabled()
        gc.disable()  # finalizers would run at moments that no seed decides
        try:
            with virtual_time(self.simulation, SimulatedConnection):
                self._start("controller", "controller")
                self._start("trainer", "trainer")
                for number in range(SAMPLERS):
                    self._start(f"sampler-{number}", "sampler")
                self.simulation.run()
            self._check()
        except SimulationError as error:
            self.problem(f"{error}: {self._waiting_for()}")
        finally:
            for connection in self.network.connections:
                connection.disconnect()
            if collects:
                gc.enable()
            shutil.rmtree(self.out, ignore_errors=True)
        self.outcome.calls, self.outcome.virtual_s = self.network.calls, self.simulation.now
        return self.outcome

    def problem(self, text: str) -> None:
        """Something that must not happen has happened."""
        if text not in self.outcome.problems:
            self.log(f"BROKEN: {text}")
            self.outcome.problems.append(text)
        self.simulation.end()

    def log(self, text: str) -> None:
        """Note what happens, for those who look for the cause."""
        self.outcome.log.append(f"{self.simulation.now:9.3f} s  call {self.network.calls:5d}  {text}")

    # -- processes ---------------------------------------------------------------------------------------

    def _start(self, name: str, role: str) -> None:
        if self.stopping:
            return
        number = 1 + sum(p.role == role for p in self.processes)
        process = Process(name, role, number)
        self.processes.append(process)
        self.simulation.start(process, partial(self._main, process))

    def _main(self, process: Process) -> None:
        self.log(f"{process} starts")
        try:
            MAINS[process.role](self.place, process)
        except Exception as error:  # noqa: BLE001 (whatever ends a process)
            process.error = error
            self.log(f"{process} ends: {type(error).__name__}: {error}")
            if not isinstance(error, EXPECTED):
                self.log("".join(traceback.format_exception(error)))
                self.problem(f"{process.name} ended with {type(error).__name__}: {error}")
        except Killed:
            raise
        else:
            self.log(f"{process} has finished")
        self.simulation.at(self.simulation.now, partial(self._ended, process))

    def _ended(self, process: Process) -> None:
        process.ended = True
        if process.role == "trainer" and process.error is None and not process.dead and not self.stopping:
            self._finish(process)
        elif process.role == "sampler" and process.error is not None:
            self.ended_samplers += 1
        if self.stopping:
            if all(p.ended or p.dead for p in self.processes):
                self.simulation.end()
            return
        pause = RESTART_S * (0.5 + self.simulation.rng.random())
        if process.role != "controller" or process.error is not None or process.dead:
            self.simulation.at(self.simulation.now + pause, partial(self._replace, process))

    def _replace(self, process: Process) -> None:
        """Start a process again, unless another one of its name has taken its place."""
        if not any(p.name == process.name and not (p.ended or p.dead) for p in self.processes):
            self._start(process.name, process.role)

    def _finish(self, finished: Process) -> None:
        """The run is complete: stop the others."""
        self.stopping = True
        self.injection.stop()
        for process in self.processes:
            if not (process.ended or process.dead):
                if process.service is None:
                    self._kill(process)
                elif process.role == "trainer":
                    # One that was replaced and does not know it yet goes on, and must find out by itself.
                    if process.service.epoch.number >= finished.service.epoch.number:
                        self._kill(process)
                else:
                    stop(process)
        self.simulation.at(self.simulation.now + STOP_S, self._give_up)
        if all(p.ended or p.dead for p in self.processes):
            self.simulation.end()

    def _give_up(self) -> None:
        late = [str(p) for p in self.processes if not (p.ended or p.dead)]
        self.problem(f"{', '.join(late)} did not stop within {STOP_S:g} s of the end")
        self.simulation.end()

    def _kill(self, process: Process) -> None:
        self.log(f"{process} is killed")
        self.simulation.kill(process)
        self.simulation.at(self.simulation.now, partial(self._ended, process))

    def _waiting_for(self) -> str:
        return ", ".join(str(p) for p in self.processes if not (p.ended or p.dead)) or "nobody is left"

    # -- what must hold ----------------------------------------------------------------------------------

    def _check(self) -> None:
        if not self.stopping:
            self.problem(f"not finished after {LIMIT_S:g} s: {self._waiting_for()}")
            return
        checkpoint = read_latest(self.out)
        next_batch = None if checkpoint is None else checkpoint.next_batch
        for text in check_reports(self.observer.reports, next_batch, self.config, self._expected()):
            self.problem(text)

    def _expected(self) -> ExpectedDigest:
        config = self.config

        @cache
        def digest(batch: int) -> str:
            items = plan_batch(ITEMS, config.order_seed, batch, config.batch.prompts)
            return prompts_digest(encode_item(i) for i in items for _ in range(config.batch.group_size))

        return digest


def _memory() -> str | None:
    """A file system in memory, if there is one: a history writes many small files."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
