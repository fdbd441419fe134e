"""Building of micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leeway.messages import Rollout, RolloutHeader
from leeway_trainer.batch import BatchError, build_micro_batch, rank_micro_batches


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
    batch = build_micro_batch([a, b], [4, 2], temperature=0.5, vocabulary=10, packed=False)
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
    for packed in (False, True):
        batch = build_micro_batch(items, range(4), temperature=1.0, vocabulary=1, packed=packed)
        assert batch.tokens == sum(r.response_ids.size for r in items)
        if not packed:
            assert batch.positions.unique().numel() == batch.tokens


def test_a_packed_row_holds_a_prompt_once():
    a, b, c = (rollout([3, 4], response, [[]] * len(response)) for response in ([5, 6, 7], [8], [5, 6, 7]))
    other = rollout([9], [1, 2], [[]] * 2)
    batch = build_micro_batch([a, b, c, other], [0, 1, 2, 5], temperature=1.0, vocabulary=10, packed=True)
    assert batch.layout is not None
    assert batch.input_ids.tolist() == [[3, 4, 5, 6, 5, 6, 9, 1]]
    assert batch.layout.position_ids.tolist() == [0, 1, 2, 3, 2, 3, 0, 1]
    assert batch.positions.tolist() == [1, 2, 3, 1, 1, 4, 5, 6, 7]
    assert batch.query.targets.tolist() == [5, 6, 7, 8, 5, 6, 7, 1, 2]
    assert batch.sequence.tolist() == [0, 0, 0, 1, 2, 2, 2, 5, 5]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [16, 24, 1000])
def test_equal_prompts_share_wherever_they_are_in_the_batch(ranks, budget):
    prompts = [[1, 2, 3], [4], [1, 2, 3], [5, 6], [4]]
    items = [rollout(prompt, list(range(2, 6 + i)), [[]] * (4 + i)) for i, prompt in enumerate(prompts)]
    batches = [
        rank_micro_batches(
            items, budget_tokens=budget, temperature=1.0, vocabulary=10, packed=True, rank=rank, ranks=ranks
        )
        for rank in range(ranks)
    ]
    assert len({len(part) for part in batches}) == 1
    every = [batch for part in batches for batch in part if batch.counts]
    assert sorted(i for batch in every for i in batch.sequence.unique().tolist()) == list(range(5))
    if ranks == 1 and budget == 1000:
        assert every[0].input_ids.numel() == 3 + 1 + 2 + sum(item.response_ids.size - 1 for item in items)
    for batch in every:
        read = batch.input_ids[0, batch.positions]
        for i in batch.sequence.unique().tolist():
            ids = [*items[i].prompt_ids.tolist(), *items[i].response_ids.tolist()]
            assert read[batch.sequence == i].tolist() == ids[len(prompts[i]) - 1 : -1]
            assert batch.query.targets[batch.sequence == i].tolist() == items[i].response_ids.tolist()


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
        build_micro_batch([item], [0], temperature=1.0, vocabulary=10, packed=True)
