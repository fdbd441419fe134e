"""The proof of a chaos run: it passes on a sound history and names each thing that can be wrong."""

from __future__ import annotations

from typing import Any

import pytest

from leeway.batches import plan_ticket_ids, tickets_digest
from leeway.config.load import build_config
from leeway.messages import ReportHeader
from leeway_host.launch.chaos import SPARE_STEPS, chaos_config
from leeway_host.launch.faults import KINDS, SAMPLERS, plan_faults
from leeway_host.launch.history import check_history, is_repeat

CONFIG = build_config(
    {
        "task": {"kind": "digits"},
        "batch": {"prompts": 2, "group_size": 2},
        "trainer": {"steps": 6, "checkpoint_every": 2},
    }
)


def expected(batch: int) -> str:
    return f"prompts of {batch}"


def started(epoch: int, step: int, version: int) -> ReportHeader:
    return ReportHeader(event="started", epoch=epoch, step=step, version=version)


def step(epoch: int, number: int, version: int, **change: Any) -> ReportHeader:
    metrics = {
        "batch/digest": expected(number),
        "batch/tickets": tickets_digest(plan_ticket_ids(epoch, version, number, 2, 2)),
        **change,
    }
    return ReportHeader(event="step", epoch=epoch, step=number, version=version, metrics=metrics)


def history() -> list[ReportHeader]:
    """Killed after step 3 (checkpoint at 2), then through to the end; a resync after step 4."""
    return [
        started(1, 0, 0),
        *(step(1, k, 0) for k in range(4)),
        started(2, 2, 1),
        *(step(2, k, 1) for k in (2, 3, 4)),
        step(2, 5, 2),
        ReportHeader(event="finished", epoch=2, step=6, version=2),
    ]


def rows() -> list[dict[str, Any]]:
    return [{"step": k, "epoch": 1 if k < 2 else 2} for k in range(6)]


def problems(
    reports: list[ReportHeader], table: list[dict[str, Any]] | None = None, checkpoint: int = 6
) -> str:
    return "\n".join(check_history(reports, rows() if table is None else table, checkpoint, CONFIG, expected))


def test_a_sound_history_passes() -> None:
    assert problems(history()) == ""


def without(index: int) -> list[ReportHeader]:
    reports = history()
    del reports[index]
    return reports


def with_(index: int, report: ReportHeader) -> list[ReportHeader]:
    reports = history()
    reports[index] = report
    return reports


BROKEN = {
    "a step is missing": (without(3), "step 3, expected 2"),
    "a step is duplicated": (history()[:3] + history()[2:], "epoch 1: step 1, expected 2"),
    "two steps changed places": (
        [*history()[:2], history()[3], history()[2], *history()[4:]],
        "step 2, expected 1",
    ),
    "a resume skips a batch": (with_(5, started(2, 5, 1)), "started at batch 5 after 4 were done"),
    "a resume from nowhere": (with_(5, started(2, 3, 1)), "started at batch 3 after 4 were done"),
    "an older trainer continues": (with_(7, step(1, 3, 0)), "step 3 of epoch 1 came in epoch 2"),
    "an epoch that does not rise": (with_(5, started(1, 2, 1)), "epoch 1 was started after epoch 1"),
    "other prompts": (
        with_(2, step(1, 1, 0, **{"batch/digest": "x"})),
        "epoch 1, step 1: prompts or their order differ",
    ),
    "a ticket of another version": (
        with_(2, step(1, 1, 0, **{"batch/tickets": tickets_digest(plan_ticket_ids(1, 1, 1, 2, 2))})),
        "epoch 1, step 1: not exactly one rollout per ticket of version 0",
    ),
    "a ticket twice": (
        with_(2, step(1, 1, 0, **{"batch/tickets": tickets_digest(["1.0.1.0.0"] * 2)})),
        "not exactly one rollout per ticket",
    ),
    "a version that falls": (with_(9, step(2, 5, 0)), "version fell from 1"),
    "no end": (history()[:-1], "does not end with the report of 6 finished steps"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_whatever_is_wrong_is_named(what: str) -> None:
    reports, words = BROKEN[what]
    assert words in problems(reports)


def test_the_files_must_agree() -> None:
    assert "metrics.jsonl has steps" in problems(history(), rows()[:-1])
    assert "metrics.jsonl has steps" in problems(history(), [*rows(), rows()[-1]])
    assert "step 2 is from epoch 1, but was trained last in epoch 2" in problems(
        history(), [{**row, "epoch": 1} if row["step"] == 2 else row for row in rows()]
    )
    assert "before batch 4, expected 6" in problems(history(), checkpoint=4)


def test_a_report_written_twice_is_one() -> None:
    assert is_repeat(step(1, 2, 0), step(1, 2, 0))
    assert not is_repeat(None, step(1, 2, 0))
    assert not is_repeat(step(1, 2, 0), step(2, 2, 0))
    assert not is_repeat(started(1, 0, 0), step(1, 0, 0))


def test_faults_are_planned_by_the_seed() -> None:
    faults = plan_faults(40, 7)
    assert faults == plan_faults(40, 7)
    assert faults != plan_faults(40, 8)
    assert {kind: sum(f.kind == kind for f in faults) for kind in KINDS} == dict.fromkeys(KINDS, 10)
    assert {f.target for f in faults if f.kind == "kill"} == {
        "controller",
        "trainer",
        *(f"sampler-{i}" for i in range(SAMPLERS)),
    }
    steps = [f.after_steps for f in faults]
    assert steps == sorted(set(steps))
    config = chaos_config(CONFIG, 40)
    assert config.trainer.steps >= steps[-1] + SPARE_STEPS + len(steps)
    assert config.redis.appendonly
    assert {f.kind for f in plan_faults(10, 1, ["cut"])} == {"cut"}
