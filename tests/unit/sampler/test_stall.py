"""How long an engine has drawn nothing, and what does not count."""

from __future__ import annotations

import pytest

from leeway_sampler.stall import StallClock


def clock(**change: float) -> StallClock:
    return StallClock(**{"limit_s": 10.0, "first_s": 60.0, "step_s": 3.0, **change})


def beats(
    watched: StallClock, start: int, count: int, *, drawn: int, inflight: int = 1, pausing: bool = False
) -> None:
    for second in range(start, start + count):
        watched.look(float(second), drawn=drawn, inflight=inflight, pausing=pausing)


def test_an_engine_without_a_token_hangs_after_the_limit():
    watched = clock()
    beats(watched, 0, 5, drawn=7)
    beats(watched, 5, 6, drawn=7)
    assert not watched.hung
    assert watched.silent_s == 10.0  # the first look saw a token
    beats(watched, 11, 2, drawn=7)
    assert watched.hung


def test_a_token_starts_the_time_again():
    watched = clock()
    for drawn in range(50):
        beats(watched, 9 * drawn, 9, drawn=drawn)
        assert not watched.hung


@pytest.mark.parametrize(("inflight", "pausing"), [(0, False), (1, True)])
def test_without_requests_and_while_weights_are_replaced_nothing_is_expected(inflight, pausing):
    watched = clock()
    beats(watched, 0, 100, drawn=7, inflight=inflight, pausing=pausing)
    assert not watched.hung


def test_a_pause_for_weights_does_not_forgive_what_was_before():
    watched = clock()
    beats(watched, 0, 9, drawn=7)
    beats(watched, 9, 50, drawn=7, pausing=True)
    beats(watched, 59, 4, drawn=7)
    assert watched.hung


def test_the_first_token_may_take_as_long_as_a_start():
    watched = clock()
    beats(watched, 0, 60, drawn=0)
    assert not watched.hung
    beats(watched, 60, 3, drawn=0)
    assert watched.hung


def test_time_in_which_the_process_was_stopped_does_not_count():
    watched = clock()
    beats(watched, 0, 5, drawn=7)
    before = watched.silent_s
    watched.look(100_000.0, drawn=7, inflight=1, pausing=False)
    assert watched.silent_s == before + 3.0
    assert not watched.hung
