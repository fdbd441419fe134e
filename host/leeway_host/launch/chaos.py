"""`leeway chaos`: a run whose processes are killed, paused, cut off and restarted, and what must hold of it.

plan_faults     seed -> faults (pure)
ChaosRun        a LocalRun that injects one fault after the other, each after progress since the last
check_history   was every batch trained once, in order, from exactly its tickets? (history.py)
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from leeway.batches import plan_batch, prompts_digest
from leeway.config import RunConfig
from leeway.errors import UsageError
from leeway.messages import ReportHeader
from leeway.streams import client_name
from leeway_host.launch.history import ExpectedDigest, check_history
from leeway_host.launch.local import LocalRun, Result
from leeway_host.launch.record import read_rows
from leeway_host.launch.services import Service

Kind = Literal["kill", "pause", "cut", "restart-redis"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PAUSE_S = 6.0
STEPS_PER_FAULT = 2
SPARE_STEPS_PER_FAULT = 1
MAX_DELAY_S = 1.0
SPARE_STEPS = 20
"""For faults that come late: on a fast machine steps pass before the launcher sees that one is due."""
SAMPLERS = 2
SERVICES = ["controller", "trainer", *(f"sampler-{i}" for i in range(SAMPLERS))]
REDIS = "redis"


@dataclass(frozen=True)
class Fault:
    """One planned fault, due once `after_steps` steps were trained and `delay` of a step's time has passed.

    While `target` is down it hits another service: the run would end before a fault that waits.
    """

    number: int
    kind: Kind
    target: str
    after_steps: int
    delay: float
    pick: float
    """In [0, 1): which of the target's processes a kill hits, 0 the service itself."""


@dataclass
class Injected:
    """A fault that happened."""

    fault: Fault
    at_s: float
    step: int
    hit: str
    recovered_s: float | None = None
    """Seconds until the next step was trained."""


def plan_faults(count: int, seed: int, kinds: Sequence[Kind] = KINDS) -> list[Fault]:
    """`count` faults, their kinds in equal shares and shuffled; a pure function of its arguments."""
    rng = np.random.default_rng(seed)
    targets = {"kill": SERVICES, "pause": [*SERVICES, REDIS], "cut": SERVICES, "restart-redis": [REDIS]}
    order = rng.permutation([i % len(kinds) for i in range(count)])
    faults = []
    for number, index in enumerate(order):
        kind = kinds[int(index)]
        faults.append(
            Fault(
                number=number + 1,
                kind=kind,
                target=str(rng.choice(targets[kind])),
                after_steps=1 + STEPS_PER_FAULT * number + int(rng.integers(STEPS_PER_FAULT)),
                delay=round(float(rng.uniform(0, 1.0)), 3),
                # Half of the kills hit the service itself, the others one of its children.
                pick=round(max(0.0, float(rng.uniform(-1, 1))), 3),
            )
        )
    return faults


def chaos_config(config: RunConfig, faults: int) -> RunConfig:
    """The configuration with two samplers, restarts for every fault, and steps enough for all of them."""
    sync, trainer = config.sync, config.trainer
    steps = (STEPS_PER_FAULT + SPARE_STEPS_PER_FAULT) * faults + SPARE_STEPS
    change = {
        "sampler": {"replicas": SAMPLERS, "max_restarts": faults, "max_deliveries": faults + 2},
        "trainer": {
            "steps": max(trainer.steps, steps),
            "max_restarts": faults,
            "checkpoint_every": min(trainer.checkpoint_every or 4, 4),
        },
        # Shorter than a pause, so that tickets of paused samplers change hands.
        "sync": {"heartbeat_s": min(sync.heartbeat_s, 1.0), "ticket_idle_s": min(sync.ticket_idle_s, 4.0)},
        "redis": {"appendonly": True},
    }
    if config.redis.url:
        raise UsageError("leeway chaos restarts its Redis server: leave redis.url away, it starts one")
    data = config.model_dump()
    for section, values in change.items():
        data[section] |= values
    return RunConfig.model_validate(data)


class ChaosRun(LocalRun):
    """A run that `faults` happen to. `problems` says what broke, after `run`."""

    def __init__(
        self, config: RunConfig, out: Path, faults: Sequence[Fault], *, as_json: bool = False
    ) -> None:
        super().__init__(chaos_config(config, len(faults)), out, as_json=as_json)
        self.planned = list(faults)
        self.injected: list[Injected] = []
        self.reports: list[ReportHeader] = []
        self.problems: list[str] = []
        self.began_at = time.monotonic()
        self.due_at: float | None = None
        self.progress = False

    def run(self) -> Result:
        """Run to the end, then check what the run left; the result's exit code is 1 when anything broke."""
        result = super().run()
        self.problems = self._check(result)
        (self.out / "chaos.json").write_text(
            json.dumps(
                {"faults": [asdict(injected) for injected in self.injected], "problems": self.problems},
                indent=1,
            )
            + "\n"
        )
        code = result.exit_code or int(bool(self.problems))
        return Result(result.summary, result.out, code)

    # -- faults ------------------------------------------------------------------------------------

    def _service(self, name: str, argv: list[str], env: dict[str, str], max_restarts: int = 0) -> Service:
        return super()._service(name, argv, env, max(max_restarts, 2 * len(self.planned)))

    def _prepare_model(self) -> Path:
        self.model = super()._prepare_model()
        return self.model

    def _on_report(self, report: ReportHeader) -> None:
        self.reports.append(report)
        if report.event != "step":
            return
        self.progress = True
        if self.injected and self.injected[-1].recovered_s is None:
            last = self.injected[-1]
            last.recovered_s = round(time.monotonic() - self.began_at - last.at_s, 2)

    def _after_pass(self) -> None:
        if len(self.injected) == len(self.planned) or not self.progress:
            return
        fault = self.planned[len(self.injected)]
        step = self.reports[-1].step
        if step < fault.after_steps:
            return
        now = time.monotonic()
        if self.due_at is None:
            step_s = float(self.reports[-1].metrics.get("time/step_s") or 0.0)
            self.due_at = now + fault.delay * min(step_s, MAX_DELAY_S)
        hit = self._inject(fault) if now >= self.due_at else None
        if hit is not None:
            self.due_at, self.progress = None, False
            self.injected.append(Injected(fault, round(now - self.began_at, 2), step, hit))
            self.view.note(f"fault {fault.number} of {len(self.planned)}: {hit}")

    def _inject(self, fault: Fault) -> str | None:
        """Make it happen; returns what was hit, None while there is nothing to hit."""
        assert self.server is not None
        if fault.kind == "restart-redis":
            self.server.restart()
            return "kill -9 redis, started again"
        if fault.target == REDIS:
            assert self.server.pid is not None
            return _pause(os.kill, self.server.pid, REDIS)
        for name in (fault.target, *(name for name in SERVICES if name != fault.target)):
            if (hit := self._hit(fault, name)) is not None:
                return hit
        return None

    def _hit(self, fault: Fault, name: str) -> str | None:
        """The fault on one service; None while that is down, or has no connection to be cut."""
        service = next(s for s in self.services if s.name == name)
        if service.pid is None or not service.running:
            return None
        if fault.kind == "cut":
            cut = self._cut(name)
            return f"cut {cut} connections of {name}" if cut else None
        if fault.kind == "kill":
            return _kill_one(service, fault.pick)
        return _pause(os.killpg, service.pid, name)

    def _cut(self, target: str) -> int:
        name = client_name(self.run_id, target)
        clients: Any = self.client.client_list()
        ids = [client["id"] for client in clients if client["name"] == name]
        return sum(int(self.client.client_kill_filter(_id=i)) for i in ids)

    # -- proof -------------------------------------------------------------------------------------

    def _check(self, result: Result) -> list[str]:
        if result.exit_code:
            return [f"the run itself failed: {result.summary['error']}"]
        problems = []
        if len(self.injected) < len(self.planned):
            problems.append(f"the run ended after {len(self.injected)} of {len(self.planned)} faults")
        pointer = self.out / "checkpoints" / "latest"
        checkpoint = None
        if pointer.exists():
            state = json.loads((pointer.parent / pointer.read_text().strip() / "leeway.json").read_text())
            checkpoint = state["next_batch"]
        rows = read_rows(self.out / "metrics.jsonl")
        expected = expected_digest(self.config, self.model)
        return problems + check_history(self.reports, rows, checkpoint, self.config, expected)


def show(run: ChaosRun, console: Console) -> None:
    """The table of faults, and the proof or what broke."""
    table = Table("", "at", "step", "fault", "next step after", title="faults")
    for injected in run.injected:
        after = "-" if injected.recovered_s is None else f"{injected.recovered_s:.1f} s"
        cells = [str(injected.fault.number), f"{injected.at_s:.0f} s", str(injected.step + 1)]
        table.add_row(*cells, injected.hit, after)
    console.print(table)
    for problem in run.problems:
        console.print(f"BROKEN: {problem}", style="bold red", highlight=False)
    if run.problems:
        return
    steps = [report for report in run.reports if report.event == "step"]
    wanted, epochs = run.config.trainer.steps, len({report.epoch for report in run.reports})
    duplicates = sum(int(float(r.metrics.get("rollouts/duplicates") or 0)) for r in steps)
    proof = (
        f"holds after {len(run.injected)} faults: {wanted} batches trained, each once and in order "
        f"({len(steps)} steps in {epochs} run epochs, {len(steps) - wanted} undone by a resume)",
        "each from exactly one rollout per planned ticket under one weight version "
        f"({duplicates} second answers were dropped)",
        "prompts and their order are those of an undisturbed run",
    )
    console.print("\n".join(proof), highlight=False)


def expected_digest(config: RunConfig, model: Path) -> ExpectedDigest:
    """Digests of the batches as planned, computed here from data set, seed and tokenizer alone."""
    from transformers import AutoTokenizer

    from leeway.tasks import encode_prompt, load_task

    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    task = load_task(config.task)

    @cache
    def digest(batch: int) -> str:
        items = plan_batch(len(task), config.order_seed, batch, config.batch.prompts)
        prompts = [encode_prompt(tokenizer, task.item(item), config.task) for item in items]
        return prompts_digest(ids for ids in prompts for _ in range(config.batch.group_size))

    return digest


def _kill_one(service: Service, pick: float) -> str | None:
    """SIGKILL to one process of the service's group; returns which, None when there is none."""
    group = [
        process
        for process in psutil.process_iter(["pid", "cmdline"])
        if _in_group(process.pid, service.pid)
        and "resource_tracker" not in " ".join(process.info["cmdline"] or [])
    ]
    group.sort(key=lambda process: (process.pid != service.pid, process.pid))
    if not group:
        return None
    victim = group[int(pick * len(group))]
    _signal(os.kill, victim.pid, signal.SIGKILL)
    child = "" if victim.pid == service.pid else f" (its child {victim.pid})"
    return f"kill -9 {service.name}{child}"


def _pause(send: Any, pid: int, name: str) -> str:
    """Stop a process (`os.kill`) or a group (`os.killpg`), and let it go on after `PAUSE_S`."""
    _signal(send, pid, signal.SIGSTOP)
    timer = threading.Timer(PAUSE_S, _signal, (send, pid, signal.SIGCONT))
    timer.daemon = True
    timer.start()
    return f"pause {name} for {PAUSE_S:g} s"


def _in_group(pid: int, group: int | None) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


def _signal(send: Any, pid: int, number: int) -> None:
    try:
        send(pid, number)
    except ProcessLookupError:
        pass  # it ended meanwhile
