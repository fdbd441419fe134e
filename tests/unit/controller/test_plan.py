"""Planning is a pure function of data set, seed and step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway_controller.plan import PromptError, check_prompt, plan_batch, plan_tickets, ticket_seed


@given(st.integers(1, 50), st.integers(0, 100), st.integers(0, 30), st.integers(1, 20))
def test_membership_is_pure_and_in_range(size: int, seed: int, batch: int, prompts: int) -> None:
    items = plan_batch(size, seed, batch, prompts)
    assert items == plan_batch(size, seed, batch, prompts)
    assert len(items) == prompts
    assert all(0 <= i < size for i in items)


@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 9))
def test_every_item_is_used_once_before_any_is_used_again(size: int, seed: int, prompts: int) -> None:
    walked: list[int] = []
    batch = 0
    while len(walked) < 3 * size:
        walked += plan_batch(size, seed, batch, prompts)
        batch += 1
    for epoch in range(3):
        assert sorted(walked[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_seeds_differ_between_slots_and_runs() -> None:
    seeds = {ticket_seed(s, b, g, i) for s in range(3) for b in range(4) for g in range(4) for i in range(4)}
    assert len(seeds) == 3 * 64
    assert all(0 <= s < 2**31 for s in seeds)


def test_tickets_cover_the_batch_and_keep_their_seed_over_versions() -> None:
    def tickets(version: int) -> list[tuple[object, int, list[int]]]:
        planned = plan_tickets(
            [7, 2], [[1, 2], [3]], seed=0, epoch=1, version=version, batch=5, group_size=3, max_new_tokens=4
        )
        assert len({t.header.ticket_id for t in planned}) == 6
        return [(t.header.slot, t.header.seed, t.prompt_ids.tolist()) for t in planned]

    assert tickets(1) == tickets(2)
    assert [slot.group for slot, _, _ in tickets(1)] == [0, 0, 0, 1, 1, 1]  # type: ignore[attr-defined]


def test_prompts_that_cannot_be_used_are_named() -> None:
    check_prompt([1] * 8, 0, 8, 16)
    with pytest.raises(PromptError, match="item 4 .* 9 tokens"):
        check_prompt([1] * 9, 4, 8, 16)
    with pytest.raises(PromptError, match="item 4 .* empty"):
        check_prompt([], 4, 8, 16)
