"""Packed rows: who sees whom, and attention in blocks against one call with a mask for the whole row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from leeway_trainer.attention import packed_attention
from leeway_trainer.packing import Group, packed_layout

GROUPS = [
    [Group(4, (3, 3)), Group(3, (1, 5, 2)), Group(4, (0, 2))],  # two prompts of one length
    [Group(1, (2, 2, 2))],  # a prompt of one token
    [Group(5, (0,))],  # one response of one token, which is never read
    [Group(2, (6,)), Group(7, (1, 1, 1, 1))],
]


def who(groups: list[Group]) -> list[tuple[int, int, int]]:
    """(group, response or -1 for the prompt, position) of each token of the row."""
    tokens = []
    for g, group in enumerate(groups):
        tokens += [(g, -1, t) for t in range(group.prompt)]
        for r, length in enumerate(group.responses):
            tokens += [(g, r, group.prompt + t) for t in range(length)]
    return tokens


def visible(groups: list[Group], window: int | None) -> torch.Tensor:
    """[T, T] bool, from the definition."""
    tokens = who(groups)
    return torch.tensor(
        [
            [
                g == other_g and other_r in (-1, r) and 0 <= t - other_t < (window or len(tokens))
                for other_g, other_r, other_t in tokens
            ]
            for g, r, t in tokens
        ]
    )


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_blocks_equal_one_masked_call(groups, window, kv_heads):
    layout, tokens = packed_layout(groups), len(who(groups))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, tokens, heads, 8, generator=generator, dtype=torch.float64)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    )
    found = packed_attention(query, key, value, layout, 0.3, window)
    mask = visible(groups, window)
    want = F.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, want, atol=1e-12, rtol=0)
    weight = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    got = torch.autograd.grad((found * weight).sum(), [query, key, value])
    for x, y in zip(got, torch.autograd.grad((want * weight).sum(), [query, key, value]), strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=0)


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
        min_size=1,
        max_size=6,
    )
)
def test_positions_and_predictions(lengths):
    groups = [Group(prompt, tuple(responses)) for prompt, responses in lengths]
    layout, tokens = packed_layout(groups), who(groups)
    assert layout.position_ids.tolist() == [t for *_, t in tokens]
    assert sorted(layout.restore.tolist()) == sorted(set(layout.restore.tolist())), "each output is used once"
    want = [
        (g, r if n else -1, group.prompt - 1 + n)
        for g, group in enumerate(groups)
        for r, length in enumerate(group.responses)
        for n in range(length + 1)
    ]
    assert [tokens[i] for i in layout.predicts.tolist()] == want
