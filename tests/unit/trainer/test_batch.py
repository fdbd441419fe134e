"""Planning and building of micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leeway.messages import Rollout, RolloutHeader
from leeway_trainer.batch import BatchError, build_micro_batch, plan_micro_batches


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(16, 120), st.integers(1, 4))
def test_plan_covers_every_sequence_once_within_the_budget(lengths, budget, ranks):
    plan = plan_micro_batches(lengths, budget, ranks)
    assert len({len(p) for p in plan}) == 1, "every rank runs the same number of micro-batches"
    counted = [i for rank in plan for p in rank if p.counts for i in p.sequences]
    assert sorted(counted) == list(range(len(lengths)))
    for part in (p for rank in plan for p in rank):
        padded = len(part.sequences) * max(lengths[i] for i in part.sequences)
        assert padded <= budget or len(part.sequences) == 1
    assert plan == plan_micro_batches(list(lengths), budget, ranks)


def test_repeats_that_do_not_count_only_when_nothing_can_be_split():
    assert all(p.counts for rank in plan_micro_batches([5, 5, 5, 5], 100, 2) for p in rank)
    plan = plan_micro_batches([9], 100, 2)
    assert [p.counts for rank in plan for p in rank] == [True, False]


def rollout(prompt, response, heads, name="t", complete=False) -> Rollout:
    """heads: per position a list of (id, log-prob)."""
    flat = [pair for head in heads for pair in head]
    return Rollout(
        header=RolloutHeader(
            ticket_id=name,
            epoch=0,
            version=0,
            batch=0,
            group=0,
            index=0,
            item=0,
            sampler="s",
            finish_reason="stop",
            reward=0.0,
            spans=[(0, len(response), 0)],
            support_complete=complete,
        ),
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        logp=np.linspace(-1, -2, len(response)).astype(np.float32),
        head_offsets=np.cumsum([0, *map(len, heads)]).astype(np.int32),
        head_ids=np.array([i for i, _ in flat], np.int32),
        head_logp=np.array([lp for _, lp in flat], np.float32),
    )


def test_tensors_line_up_with_the_tokens():
    a = rollout([3, 4], [5, 6, 7], [[(5, -0.1)], [(6, -0.2), (8, -3.0)], []])
    b = rollout([9], [1], [[(1, -0.5)]])
    batch = build_micro_batch([a, b], [4, 2], temperature=0.5, vocabulary=10)
    assert batch.input_ids.tolist() == [[3, 4, 5, 6], [9, 0, 0, 0]]
    read = batch.input_ids.reshape(-1)[batch.positions].tolist()
    assert read == [4, 5, 6, 9], "each token is predicted at the token before it"
    assert batch.query.targets.tolist() == [5, 6, 7, 1]
    assert batch.sequence.tolist() == [4, 4, 4, 2]
    assert batch.query.head_mask.tolist() == [[True, False], [True, True], [False, False], [True, False]]
    assert batch.query.head_ids.tolist() == [[5, 0], [6, 8], [0, 0], [1, 0]]
    assert batch.head_logp_mu[1].tolist() == pytest.approx([-0.2, -3.0])
    assert torch.isneginf(batch.head_logp_mu[~batch.query.head_mask]).all()
    assert batch.logp_mu.tolist() == pytest.approx([-1, -1.5, -2, -1])
    assert batch.tokens == 4


@given(st.integers(0, 1000))
def test_lengths_make_the_masks_whatever_ids_stand_there(seed):
    rng = np.random.default_rng(seed)
    lengths = [(int(rng.integers(1, 5)), int(rng.integers(1, 6))) for _ in range(4)]
    items = [rollout([0] * p, [0] * t, [[]] * t) for p, t in lengths]
    batch = build_micro_batch(items, range(4), temperature=1.0, vocabulary=1)
    assert batch.tokens == sum(r.response_ids.size for r in items)
    assert batch.positions.unique().numel() == batch.tokens


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (rollout([3], [12], [[]]), "response_ids holds token 12"),
        (rollout([3], [1], [[(11, -1.0)]]), "head_ids holds token 11"),
        (rollout([3], [1, 2], [[(1, -1.0)], [(3, -1.0)]], complete=True), "token 1 is outside the support"),
        (rollout([3], [1], [[]], complete=True), "token 0 is outside the support"),
    ],
)
def test_untrainable_rollouts_are_named(item, message):
    with pytest.raises(BatchError, match=f"rollout t: {message}"):
        build_micro_batch([item], [0], temperature=1.0, vocabulary=10)
