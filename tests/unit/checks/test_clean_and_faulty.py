"""Checks on whole toy runs: silent on clean ones, loud on planted faults."""

from __future__ import annotations

from typing import Any

import pytest

from leeway.checks import CheckResult, Monitor
from leeway.checks.board import Records, merge
from leeway.messages import MessageError, Rollout, decode
from toy_run import MODES, ToyRun, toy_config

pytestmark = pytest.mark.thorough

STEPS = 25


def watch(run: ToyRun, steps: int = STEPS) -> Records:
    """All results of a run's monitor."""
    monitor, records = Monitor(run.config), {}
    for step in run.steps(steps):
        for manifest in step.manifests:
            monitor.on_manifest(*manifest)
        for fields in step.rollouts:
            try:
                monitor.on_rollout(decode(Rollout, fields))
            except MessageError as exc:
                monitor.on_rejected(str(exc))
        merge(records, monitor.on_step(step.report) + monitor.on_statuses(step.statuses), 0.0)
    return records


def bad(records: Records) -> dict[str, CheckResult]:
    return {name: record.worst for name, record in records.items() if record.worst.status != "ok"}


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(s, marks=pytest.mark.slow) for s in range(6, 20))]
)
def test_a_clean_run_raises_no_alarm(seed: int) -> None:
    mode, rate = list(MODES)[seed % len(MODES)], (0.3, 1.0, 3.0)[seed % 3]
    records = watch(ToyRun(seed, toy_config(MODES[mode]), learning_rate=rate))
    assert not bad(records), mode
    assert {name.split("/")[0] for name in records} == {
        "sampling_distribution", "retokenisation", "deferral", "reward_filter", "version", "numerics",
        "collapse",
    }  # fmt: skip
    for name in ("calibration", "ratio_mean", "probe", "support"):
        assert f"sampling_distribution/{name}" in records
    assert {"version/resync_took", "collapse/self_prefix_kl", "deferral/age"} <= set(records)


FAULTS: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    (
        "raw_logprobs",
        {"temperature": 0.7},
        {},
        {
            "sampling_distribution/calibration",
            "sampling_distribution/ratio_mean",
            "sampling_distribution/probe",
        },
    ),
    ("top_p_without_support", {}, {}, {"sampling_distribution/ratio_mean"}),
    ("banned_token", {}, {}, {"sampling_distribution/ratio_mean"}),
    ("reencoded_text", {}, {}, {"retokenisation/ids_unchanged"}),
    ("reward_filter", {}, {}, {"reward_filter/groups", "reward_filter/rewards", "deferral/selection"}),
    ("silent_reward_filter", {}, {}, {"reward_filter/groups", "reward_filter/denominators"}),
    ("first_finished", {}, {}, {"deferral/lengths", "deferral/selection", "deferral/outstanding"}),
    ("label_moved", {}, {"fault_from": 8}, {"version/resync_took"}),
    ("label_moved_unmeasured", {}, {"fault_from": 8}, {"version/resync_took", "numerics/discrepancy"}),
    ("stale_head", {}, {"fault_from": 8}, {"numerics/discrepancy"}),
    ("wrong_digest", {}, {"fault_from": 8}, {"version/attested"}),
    ("nan_logprob", {}, {"fault_from": 8}, {"numerics/non_finite"}),
    ("collapse", {}, {"fault_from": 8}, {"collapse/self_prefix_kl"}),
]


@pytest.mark.parametrize(("fault", "sampling", "when", "expected"), FAULTS, ids=[f[0] for f in FAULTS])
def test_a_planted_fault_fails_its_checks(
    fault: str, sampling: dict[str, Any], when: dict[str, Any], expected: set[str]
) -> None:
    sections = {"checks": {"self_prefix_responses": 0}} if fault.endswith("_unmeasured") else {}
    run = ToyRun(3, toy_config(sampling, **sections), fault=fault.removesuffix("_unmeasured"), **when)
    found = bad(watch(run))
    failed = {name for name, result in found.items() if result.status == "fail"}
    assert expected <= failed, found
    assert all(result.step is None or result.step >= run.fault_from for result in found.values())
