"""`leeway chaos`: a run whose processes are killed, paused, cut off and restarted, and its proof.

plan_faults     seed -> faults (pure)                                                         faults.py
ChaosRun        a LocalRun that injects one fault after the other, each after progress since the last
check_history   was every batch trained once, in order, from exactly its tickets? (pure)      history.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from leeway.batches import plan_batch, prompts_digest
from leeway.checkpoints.find import read_latest
from leeway.config import RunConfig
from leeway.errors import UsageError
from leeway.messages import ReportHeader
from leeway.metrics.areas.time import TIME_STEP_S
from leeway.metrics.areas.tokens import ROLLOUTS_DUPLICATES
from leeway.models.tokenizer import load_tokenizer
from leeway_host.launch.faults import SAMPLERS, STEPS_PER_FAULT, Fault, Injector
from leeway_host.launch.history import ExpectedDigest, check_history
from leeway_host.launch.local import LocalRun, Result
from leeway_host.launch.record import read_rows

SPARE_STEPS_PER_FAULT = 1
SPARE_STEPS = 20
"""For faults that come late: on a fast machine, steps pass before the launcher sees that one is due."""
MAX_DELAY_S = 1.0


@dataclass
class Injected:
    """A fault that happened."""

    fault: Fault
    at_s: float
    step: int
    hit: str
    recovered_s: float | None = None
    """Seconds until the next step was trained."""


def chaos_config(config: RunConfig, faults: int) -> RunConfig:
    """The configuration with two samplers, a restart for every fault, and enough steps for all of them."""
    sync, trainer = config.sync, config.trainer
    steps = (STEPS_PER_FAULT + SPARE_STEPS_PER_FAULT) * faults + SPARE_STEPS
    change = {
        "sampler": {"replicas": SAMPLERS, "max_restarts": faults},
        "trainer": {
            "steps": max(trainer.steps, steps),
            "max_restarts": faults,
            "checkpoint_every": min(trainer.checkpoint_every or 4, 4),
        },
        # Shorter than a pause, so that tickets of paused samplers are claimed by others.
        "sync": {"heartbeat_s": min(sync.heartbeat_s, 1.0), "ticket_idle_s": min(sync.ticket_idle_s, 4.0)},
        "redis": {"appendonly": True},
    }
    if config.redis.url:
        raise UsageError("leeway chaos restarts its own Redis server: omit redis.url")
    data = config.model_dump()
    for section, values in change.items():
        data[section] |= values
    return RunConfig.model_validate(data)


class ChaosRun(LocalRun):
    """A run that `faults` happen to. After `run`, `problems` lists what broke."""

    def __init__(
        self, config: RunConfig, out: Path, faults: Sequence[Fault], *, as_json: bool = False
    ) -> None:
        super().__init__(chaos_config(config, len(faults)), out, as_json=as_json)
        self.min_restarts = 2 * len(faults)
        self.planned = list(faults)
        self.injected: list[Injected] = []
        self.reports: list[ReportHeader] = []
        self.problems: list[str] = []
        self.began_at = time.monotonic()
        self.due_at: float | None = None
        self.progress = False
        """True when a step was trained since the last fault."""

    def run(self) -> Result:
        """Run to the end, then check what the run left; the result's exit code is 1 when anything broke."""
        result = super().run()
        self.problems = self._check(result)
        record = {"faults": [asdict(injected) for injected in self.injected], "problems": self.problems}
        (self.out / "chaos.json").write_text(json.dumps(record, indent=1) + "\n")
        code = result.exit_code or int(bool(self.problems))
        return Result(result.summary, result.out, code)

    def prepare_model(self) -> Path:
        self.model = super().prepare_model()
        return self.model

    def on_report(self, report: ReportHeader) -> None:
        self.reports.append(report)
        if report.event != "step":
            return
        self.progress = True
        if self.injected and self.injected[-1].recovered_s is None:
            last = self.injected[-1]
            last.recovered_s = round(time.monotonic() - self.began_at - last.at_s, 2)

    def after_pass(self) -> None:
        """Inject the next fault once it is due."""
        if len(self.injected) == len(self.planned) or not self.progress:
            return
        fault = self.planned[len(self.injected)]
        step = self.reports[-1].step
        if step < fault.after_steps:
            return
        now = time.monotonic()
        if self.due_at is None:
            step_s = float(self.reports[-1].metrics.get(TIME_STEP_S) or 0.0)
            self.due_at = now + fault.delay * min(step_s, MAX_DELAY_S)
        hit = self._injector().inject(fault) if now >= self.due_at else None
        if hit is not None:
            self.due_at, self.progress = None, False
            self.injected.append(Injected(fault, round(now - self.began_at, 2), step, hit))
            self.view.note(f"fault {fault.number} of {len(self.planned)}: {hit}")

    def _injector(self) -> Injector:
        assert self.redis.embedded is not None
        return Injector(self.run_id, self.redis.embedded, self.redis.client, self.fleet.services)

    def _check(self, result: Result) -> list[str]:
        if result.exit_code:
            return [f"the run itself failed: {result.summary['error']}"]
        problems = []
        if len(self.injected) < len(self.planned):
            problems.append(f"the run ended after {len(self.injected)} of {len(self.planned)} faults")
        checkpoint = read_latest(self.out)
        next_batch = None if checkpoint is None else checkpoint.next_batch
        rows = read_rows(self.out / "metrics.jsonl")
        expected = expected_digest(self.config, self.model)
        return problems + check_history(self.reports, rows, next_batch, self.config, expected)


def show(run: ChaosRun, console: Console) -> None:
    """Print the table of faults, and the proof or what broke."""
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
    duplicates = sum(int(float(r.metrics.get(ROLLOUTS_DUPLICATES) or 0)) for r in steps)
    proof = (
        f"holds after {len(run.injected)} faults: {wanted} batches trained, each once and in order "
        f"({len(steps)} steps in {epochs} run epochs, {len(steps) - wanted} undone by a resume)",
        "each from exactly one rollout per planned ticket under one weight version "
        f"({duplicates} duplicate rollouts were dropped)",
        "prompts and their order are those of an undisturbed run",
    )
    console.print("\n".join(proof), highlight=False)


def expected_digest(config: RunConfig, model: Path) -> ExpectedDigest:
    """Digests of the batches as planned, computed here from data set, seed and tokenizer alone."""
    from leeway.tasks import encode_prompt, load_task

    tokenizer = load_tokenizer(model, local_files_only=True)
    task = load_task(config.task)

    @cache
    def digest(batch: int) -> str:
        items = plan_batch(len(task), config.order_seed, batch, config.batch.prompts)
        prompts = [encode_prompt(tokenizer, task.item(item), config.task) for item in items]
        return prompts_digest(ids for ids in prompts for _ in range(config.batch.group_size))

    return digest
