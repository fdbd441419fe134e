"""What must hold for a run's history whatever happened to it: the proof of a chaos run, as pure functions.

The history is every report of the trainer in stream order, including those of steps that a crash undid; the
rows are those of metrics.jsonl. Both are compared with the planned batches, not with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from leeway.batches import plan_ticket_ids, tickets_digest
from leeway.config import RunConfig
from leeway.messages import ReportHeader
from leeway.metrics.areas.data import BATCH_DIGEST, BATCH_TICKETS

ExpectedDigest = Callable[[int], str]
"""batch -> digest of its prompts in order, from planning alone."""


def is_repeat(last: ReportHeader | None, report: ReportHeader) -> bool:
    """True for a report that was written twice because the reply to the first write was lost."""
    return last is not None and (last.epoch, last.event, last.step) == (
        report.epoch,
        report.event,
        report.step,
    )


def check_history(
    reports: Sequence[ReportHeader],
    rows: Iterable[Mapping[str, Any]],
    checkpoint: int | None,
    config: RunConfig,
    expected: ExpectedDigest,
) -> list[str]:
    """One line per problem. `checkpoint`: the batch after the last checkpoint, None if there is none."""
    return [
        *check_reports(reports, checkpoint, config, expected),
        *check_rows(reports, rows, config.trainer.steps),
    ]


def check_reports(
    reports: Sequence[ReportHeader], checkpoint: int | None, config: RunConfig, expected: ExpectedDigest
) -> list[str]:
    """As `check_history`, of a run without a launcher, which writes no rows."""
    return [
        *check_order(reports, config.trainer.steps),
        *check_starts(reports, config.trainer.checkpoint_every),
        *check_contents(reports, config, expected),
        *(
            [f"the last checkpoint is before batch {checkpoint}, expected {config.trainer.steps}"]
            if checkpoint != config.trainer.steps
            else []
        ),
    ]


def check_order(reports: Sequence[ReportHeader], steps: int) -> list[str]:
    """Within a run epoch batches are consecutive; epochs and versions never fall; the end is reached."""
    problems = []
    epoch, awaited, version = -1, 0, -1
    for report in reports:
        if report.event == "started":
            if report.epoch <= epoch:
                problems.append(f"epoch {report.epoch} was started after epoch {epoch}")
            epoch, awaited, version = report.epoch, report.step, report.version
            continue
        if report.epoch != epoch:
            problems.append(f"{report.event} {report.step} of epoch {report.epoch} came in epoch {epoch}")
        if report.step != awaited:
            problems.append(f"epoch {epoch}: {report.event} {report.step}, expected {awaited}")
        if report.version < version:
            problems.append(f"epoch {epoch}, step {report.step}: version fell from {version}")
        awaited = report.step + (report.event == "step")
        version = report.version
    if not reports or reports[-1].event != "finished" or reports[-1].step != steps:
        problems.append(f"the history does not end with the report of {steps} finished steps")
    return problems


def check_starts(reports: Sequence[ReportHeader], checkpoint_every: int) -> list[str]:
    """A start continues from the beginning, a checkpoint, or the policy in memory, without a gap."""
    problems, done = [], 0
    for report in reports:
        if report.event == "started":
            known = report.step == done or (checkpoint_every and report.step % checkpoint_every == 0)
            if report.step > done or not known:
                problems.append(f"epoch {report.epoch} started at batch {report.step} after {done} were done")
        elif report.event == "step":
            done = report.step + 1
    return problems


def check_contents(reports: Iterable[ReportHeader], config: RunConfig, expected: ExpectedDigest) -> list[str]:
    """Every step, even one undone later, had the planned prompts in order and one rollout per ticket."""
    problems, batch = [], config.batch
    for report in reports:
        if report.event != "step":
            continue
        where = f"epoch {report.epoch}, step {report.step}"
        if report.metrics.get(BATCH_DIGEST) != expected(report.step):
            problems.append(f"{where}: prompts or their order differ from the plan")
        ids = plan_ticket_ids(report.epoch, report.version, report.step, batch.prompts, batch.group_size)
        if report.metrics.get(BATCH_TICKETS) != tickets_digest(ids):
            problems.append(f"{where}: not exactly one rollout per ticket of version {report.version}")
    return problems


def check_rows(reports: Iterable[ReportHeader], rows: Iterable[Mapping[str, Any]], steps: int) -> list[str]:
    """metrics.jsonl contains each step once, in order, from the epoch that trained it last."""
    problems = []
    last = {r.step: r.epoch for r in reports if r.event == "step"}
    rows = list(rows)
    if [row["step"] for row in rows] != list(range(steps)):
        problems.append(f"metrics.jsonl has steps {[row['step'] for row in rows]}, expected 0 to {steps - 1}")
    for row in rows:
        if row["epoch"] != last.get(row["step"]):
            problems.append(
                f"metrics.jsonl: step {row['step']} is from epoch {row['epoch']}, but was trained last in "
                f"epoch {last.get(row['step'])}"
            )
    return problems
