"""The services of a run: started, restarted, scaled and stopped together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leeway.checkpoints.state import has_checkpoint
from leeway_host.launch.commands import Command, LaunchPlan
from leeway_host.launch.failures import FINAL, service_failure
from leeway_host.launch.reasons import describe_exit
from leeway_host.launch.services import Service, stop_all

CONTROLLER_RESTARTS = 3


def plan_samplers(names: Sequence[str], wanted: int) -> tuple[set[str], list[str]]:
    """(samplers to remove, samplers to keep) of `names`, oldest first; the youngest are removed first."""
    return set(names[wanted:]), list(names[:wanted])


class Fleet:
    """Controller, trainer and samplers as processes of this machine.

    start -> (restart_ended | scale)* -> stop

    `note` receives lines for the user. `min_restarts`: restarts that every service is allowed, whatever the
    configuration says.
    """

    def __init__(
        self, plan: LaunchPlan, note: Callable[[str], None], *, resume: bool, min_restarts: int = 0
    ) -> None:
        self.plan, self.note, self.min_restarts = plan, note, min_restarts
        config = plan.config
        self.samplers: list[Service] = []
        self.leaving: list[Service] = []
        """Samplers that were told to drain and exit."""
        self.wanted_samplers = config.sampler.replicas
        self.controller = self._service("controller", plan.controller(), CONTROLLER_RESTARTS)
        self.trainer = self._service("trainer", plan.trainer(), config.trainer.max_restarts)
        if resume:
            self._resume_trainer()
        for _ in range(self.wanted_samplers):
            self._add_sampler()

    @property
    def services(self) -> list[Service]:
        return [self.controller, self.trainer, *self.samplers]

    def start(self) -> None:
        for service in self.services:
            service.start()

    def stop(self, grace_s: float) -> None:
        """SIGTERM to every service, and after `grace_s` seconds SIGKILL to whatever is left."""
        stop_all(self.services, grace_s)

    @property
    def finished(self) -> bool:
        """True once the trainer has ended well: all steps are done."""
        return self.trainer.poll() == 0

    def scale(self, wanted: int) -> None:
        """Start samplers, or let some drain and exit, until `wanted` are left."""
        if wanted == self.wanted_samplers:
            return
        self.wanted_samplers = wanted
        active = [sampler.name for sampler in self.samplers if sampler not in self.leaving]
        removed, kept = plan_samplers(active, wanted)
        for sampler in self.samplers:
            if sampler.name in removed:
                self.leaving.append(sampler)
                sampler.terminate()
        for _ in range(wanted - len(kept)):
            self._add_sampler().start()
        self.note(f"scaled to {wanted} samplers")

    def restart_ended(self) -> None:
        """Restart services that ended early. Raises RunFailed for one that must not be."""
        for service in self.services:
            code = service.poll()
            if code is None or (code == 0 and service in (self.controller, self.trainer)):
                continue
            if service in self.leaving:
                continue  # if it died instead of draining, others claim its tickets
            origin = ""
            if service is self.trainer:
                origin = " from the beginning"
                if self._resume_trainer():
                    origin = " from the last checkpoint"
            if code in FINAL or not service.restart():
                details = self.plan.config.telemetry.log_level == "DEBUG"
                raise service_failure(service, code, self.samplers, details=details)
            self.note(f"{service.name} ended ({describe_exit(code)}) and was restarted{origin}")

    def _add_sampler(self) -> Service:
        index = len(self.samplers)
        restarts = self.plan.config.sampler.max_restarts
        self.samplers.append(self._service(f"sampler-{index}", self.plan.sampler(index), restarts))
        return self.samplers[-1]

    def _service(self, name: str, command: Command, max_restarts: int) -> Service:
        log = self.plan.out / "logs" / f"{name}.log"
        restarts = max(max_restarts, self.min_restarts)
        return Service(name, command.argv, log, command.env, restarts, command.secret)

    def _resume_trainer(self) -> bool:
        """Have the trainer's next start continue from the last checkpoint; False when there is none."""
        if not has_checkpoint(self.plan.out):
            return False
        if "--resume" not in self.trainer.argv:
            self.trainer.argv += ["--resume", str(self.plan.out)]
        return True
