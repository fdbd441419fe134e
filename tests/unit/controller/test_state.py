"""The controller's transitions, attacked with random histories of trainer and samplers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.config import SyncConfig
from leeway.messages import ReportHeader, SamplerStatus
from leeway.policies import Decision, PolicyError
from leeway.statuses import split_live
from leeway_controller.state import (
    Attested,
    ControllerState,
    decide,
    decide_commit,
    plan_issue,
)

pytestmark = pytest.mark.thorough


def report(event: str, epoch: int, step: int, version: int, **metrics: float) -> ReportHeader:
    return ReportHeader(event=event, epoch=epoch, step=step, version=version, metrics=metrics)  # type: ignore[arg-type]


def sampler(
    name: str,
    epoch: int,
    version: int,
    heartbeat: float = 0.0,
    digest: str | None = None,
    passed: str = "",
) -> SamplerStatus:
    return SamplerStatus(
        sampler=name,
        heartbeat=heartbeat,
        epoch=epoch,
        version=version,
        digest=f"d{version}" if digest is None else digest,
        passed=passed,
    )


def running(step: int = 0, version: int = 1) -> ControllerState:
    state = ControllerState().started(report("started", 0, step, version))
    return state.published(0, version, step, 0.0).committed()


def test_nothing_is_issued_before_a_version_is_current() -> None:
    state = ControllerState()
    assert plan_issue(state, 1, 10) == []
    state = state.started(report("started", 0, 4, 1))
    assert plan_issue(state, 1, 10) == []
    state = state.published(0, 1, 4, 0.0)
    assert plan_issue(state, 1, 10) == []
    assert plan_issue(state.committed(), 1, 10) == [4, 5]


def test_lead_and_end() -> None:
    state = running(step=8)
    assert plan_issue(state, 0, 10) == [8]
    assert plan_issue(state, 5, 10) == [8, 9]
    assert plan_issue(state.issued(8), 0, 10) == []


def test_a_resync_voids_and_issues_again() -> None:
    state = running()
    for batch in plan_issue(state, 2, 10):
        state = state.issued(batch)
    assert state.next_issue == 3
    state = state.stepped(report("step", 0, 0, 1), Decision("ess"))
    assert plan_issue(state, 2, 10) == []
    state = state.published(0, 2, 1, 5.0)
    assert plan_issue(state, 2, 10) == []
    state = state.committed()
    assert (state.current, plan_issue(state, 2, 10)) == (2, [1, 2, 3])


def test_old_news_change_nothing() -> None:
    state = running(step=3, version=4)
    assert state.published(0, 4, 3, 9.0) is state
    assert state.published(0, 3, 3, 9.0) is state
    assert state.published(1, 9, 3, 9.0) is state
    assert state.started(report("started", 0, 0, 1)) is state
    assert state.stepped(report("step", 0, 2, 4), Decision("ess")) is state
    assert state.stepped(report("step", 1, 3, 4), Decision("ess")) is state


def test_a_restarted_trainer_begins_a_new_epoch() -> None:
    state = running(step=7, version=4).issued(7)
    state = state.started(report("started", 1, 5, 3))
    assert (state.epoch, state.next_step, state.current) == (1, 5, None)
    assert state.published(0, 9, 5, 0.0) is state
    assert plan_issue(state.published(1, 3, 5, 0.0).committed(), 0, 10) == [5]


def pending(version: int = 1) -> ControllerState:
    state = ControllerState().started(report("started", 0, 0, version))
    return state.published(0, version, 0, 100.0, f"d{version}")


def test_commit_waits_for_every_live_sampler_then_fences() -> None:
    state = pending()
    both = [sampler("a", 0, 1), sampler("b", -1, -1)]
    assert decide_commit(state, both, 101.0, 60.0) == Attested()
    assert decide_commit(state, both, 161.0, 60.0) == Attested(commit=True, late=["b"])
    assert decide_commit(state, [sampler("a", 0, 1)], 101.0, 60.0) == Attested(commit=True)
    assert decide_commit(state, [], 1000.0, 60.0) == Attested()
    assert decide_commit(state, [sampler("b", -1, -1)], 1000.0, 60.0) == Attested()
    other_epoch = sampler("a", 1, 1)
    assert decide_commit(state, [other_epoch], 1000.0, 60.0) == Attested()
    assert decide_commit(state.committed(), [sampler("a", 0, 1)], 0.0, 60.0) == Attested()


def test_what_is_attested_is_the_digest() -> None:
    liar = sampler("b", 0, 1, digest="other")
    state = pending()
    assert decide_commit(state, [liar], 101.0, 60.0) == Attested(wrong=["b"])
    both = [sampler("a", 0, 1), liar]
    assert decide_commit(state, both, 101.0, 60.0) == Attested(commit=True, wrong=["b"])
    assert decide_commit(state.committed(), both, 101.0, 60.0) == Attested(wrong=["b"])
    assert decide_commit(state, both, 101.0, 60.0, {"b": "f"}) == Attested(commit=True)


def test_a_fenced_sampler_counts_again_when_it_has_passed_its_fence() -> None:
    state, fences = pending(), {"b": "f2"}
    late = sampler("b", 0, 1)
    assert decide_commit(state, [sampler("a", 0, 1), late], 101.0, 60.0, fences) == Attested(commit=True)
    earlier = sampler("b", 0, 1, passed="f1")
    assert decide_commit(state, [earlier], 101.0, 60.0, fences) == Attested()
    passed = sampler("b", 0, 1, passed="f2")
    assert decide_commit(state, [passed], 101.0, 60.0, fences) == Attested(commit=True, back=["b"])
    assert decide_commit(state.committed(), [passed], 101.0, 60.0, fences) == Attested(back=["b"])


def test_a_resync_that_failed_lets_the_old_version_go_on() -> None:
    state = running().stepped(report("step", 0, 0, 1), Decision("ess"))
    assert plan_issue(state, 2, 10) == []
    assert state.kept(report("resync_failed", 1, 1, 1)) is state
    state = state.kept(report("resync_failed", 0, 1, 1))
    assert (state.current, plan_issue(state, 2, 10)) == (1, [0, 1, 2, 3])


def test_silence() -> None:
    live, silent = split_live([sampler("a", 0, 1, 95.0), sampler("b", 0, 1, 80.0)], 100.0, 10.0)
    assert ([s.sampler for s in live], [s.sampler for s in silent]) == (["a"], ["b"])


def test_decide_needs_its_metrics() -> None:
    good = {"lag/ess_tok": 0.4, "lag/ess_seq": 0.9, "lag/clip_fraction": 0.0}
    assert decide(report("step", 0, 0, 1, **good), SyncConfig(), 10, False).reason == "ess"
    with pytest.raises(PolicyError, match="lag/ess_seq is None"):
        decide(
            report("step", 0, 0, 1, **{"lag/ess_tok": 0.4, "lag/clip_fraction": 0.0}), SyncConfig(), 10, False
        )


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_random_histories_keep_the_invariants(data: st.DataObject) -> None:
    """Batches train in order, each under one current version, never more than max_lead ahead."""
    steps, lead = 12, data.draw(st.integers(0, 3))
    state = ControllerState()
    epoch, version, step = -1, 0, 0
    issued: dict[int, tuple[int, int]] = {}  # batch -> (epoch, version) of its newest tickets
    trained: list[int] = []
    for _ in range(60):
        action = data.draw(st.sampled_from(["start", "attest", "issue", "train", "crash_controller"]))
        if action == "start" or epoch < 0:
            epoch, version = epoch + 1, version + 1
            step = data.draw(st.integers(0, step))
            trained = trained[:step]
            state = state.started(report("started", epoch, step, version))
            state = state.published(epoch, version, step, 0.0)
            assert state.current is None
        elif action == "attest" and state.pending is not None:
            state = state.committed()
            assert state.current == version
        elif action == "issue":
            for batch in plan_issue(state, lead, steps):
                assert state.current == version
                assert step <= batch <= step + lead
                assert batch == state.next_issue
                issued[batch] = (epoch, version)
                state = state.issued(batch)
        elif action == "train" and issued.get(step) == (epoch, version):
            trained.append(step)
            resync = data.draw(st.booleans())
            state = state.stepped(report("step", epoch, step, version), Decision("ess" if resync else None))
            step += 1
            if resync:
                assert plan_issue(state, lead, steps) == []
                version += 1
                state = state.published(epoch, version, step, 0.0)
        elif action == "crash_controller":
            state = ControllerState.model_validate_json(state.model_dump_json())
        assert trained == list(range(len(trained)))
