"""Which sequences make which micro-batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leeway_trainer.plan import plan_packed, plan_padded

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(LENGTHS, st.integers(16, 120), st.integers(1, 4))
def test_padded_plan_covers_every_sequence_once_within_the_budget(lengths, budget, ranks):
    plan = plan_padded(lengths, budget, ranks)
    assert len({len(p) for p in plan}) == 1, "every rank runs the same number of micro-batches"
    counted = [i for rank in plan for p in rank if p.counts for i in p.sequences]
    assert sorted(counted) == list(range(len(lengths)))
    for part in (p for rank in plan for p in rank):
        padded = len(part.sequences) * max(lengths[i] for i in part.sequences)
        assert padded <= budget or len(part.sequences) == 1
    assert plan == plan_padded(list(lengths), budget, ranks)


def test_repeats_that_do_not_count_only_when_nothing_can_be_split():
    assert all(p.counts for rank in plan_padded([5, 5, 5, 5], 100, 2) for p in rank)
    plan = plan_padded([9], 100, 2)
    assert [p.counts for rank in plan for p in rank] == [True, False]
    plan = plan_packed([0], [5], [3], 100, 2)
    assert [p.counts for rank in plan for p in rank] == [True, False]


def computed(prompts, prompt_tokens, response_tokens, part) -> int:
    return sum(prompt_tokens[p] for p in {prompts[i] for i in part}) + sum(response_tokens[i] for i in part)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=8),
    st.integers(16, 200),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_packed_plan_covers_every_sequence_once_within_the_budget(groups, budget, ranks, random):
    prompts = [p for p, (_, responses) in enumerate(groups) for _ in range(responses)]
    random.shuffle(prompts)
    response_tokens = [random.randint(0, 20) for _ in prompts]
    prompt_tokens = [tokens for tokens, _ in groups]
    plan = plan_packed(prompts, prompt_tokens, response_tokens, budget, ranks)
    assert len({len(p) for p in plan}) == 1, "every rank runs the same number of micro-batches"
    parts = [p for rank in plan for p in rank]
    assert sorted(i for p in parts if p.counts for i in p.sequences) == list(range(len(prompts)))
    for part in parts:
        tokens = computed(prompts, prompt_tokens, response_tokens, part.sequences)
        assert tokens <= budget or len(part.sequences) == 1
        runs = [p for n, p in enumerate(prompts[i] for i in part.sequences)
                if n == 0 or p != prompts[part.sequences[n - 1]]]  # fmt: skip
        assert len(runs) == len(set(runs)), "responses to one prompt follow each other"
    assert plan == plan_packed(list(prompts), prompt_tokens, response_tokens, budget, ranks)


def test_a_group_is_divided_only_when_it_exceeds_the_budget():
    prompts, responses = [0] * 4 + [1] * 4, [4] * 8
    whole = plan_packed(prompts, [10, 10], responses, 30, 1)[0]
    assert [p.sequences for p in whole] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    divided = plan_packed(prompts, [10, 10], responses, 20, 1)[0]
    assert sorted(p.sequences for p in divided) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert len(plan_packed(prompts, [10, 10], responses, 52, 1)[0]) == 1
