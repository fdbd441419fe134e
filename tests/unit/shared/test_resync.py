"""The resync policy."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.config import SyncConfig
from leeway.resync import SyncFacts, decide_resync

CALM = SyncFacts(step=3, age=1, ess_token=0.99, ess_sequence=0.8, clip_fraction=0.01)


def reason(sync: SyncConfig | None = None, **change: object) -> str | None:
    return decide_resync(dataclasses.replace(CALM, **change), sync or SyncConfig()).reason  # type: ignore[arg-type]


def test_nothing_happens_while_all_is_well() -> None:
    assert reason() is None
    assert decide_resync(CALM, SyncConfig()).action == "continue"


def test_each_rule() -> None:
    assert reason(ess_token=0.49) == "ess"
    assert reason(ess_sequence=0.49) is None
    assert reason(SyncConfig(ess_level="sequence"), ess_sequence=0.49) == "ess"
    assert reason(SyncConfig(ess_threshold=None), ess_token=0.01) is None
    assert reason(clip_fraction=0.031) == "clip_fraction"
    assert reason(SyncConfig(clip_fraction=None), clip_fraction=0.9) is None
    assert reason(SyncConfig(max_age=4), age=4) == "age"
    assert reason(SyncConfig(max_age=4), age=3) is None
    assert reason(SyncConfig(every_n=4), step=3) == "every_n"
    assert reason(SyncConfig(every_n=4), step=4) is None
    assert reason(manual=True) == "manual"


def test_a_threshold_is_not_crossed_by_touching_it() -> None:
    assert reason(ess_token=0.5) is None
    assert reason(SyncConfig(clip_fraction=0.01), clip_fraction=0.01) is None


def test_no_resync_after_the_last_batch() -> None:
    assert reason(ess_token=0.1, manual=True, last=True) is None


@pytest.mark.parametrize("name", ["ess_token", "ess_sequence", "clip_fraction"])
def test_what_is_not_finite_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        reason(**{name: math.nan})


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 50), st.integers(0, 100))
def test_max_age_one_is_always_fresh(ess: float, clip: float, age: int, step: int) -> None:
    assert reason(SyncConfig(max_age=1), ess_token=ess, clip_fraction=clip, age=age, step=step) is not None
