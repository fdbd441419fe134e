"""Reading heads, log-probabilities and version spans from vLLM's output."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway_sampler.generation import (
    Head,
    LogProbError,
    build_generation,
    read_logprobs,
    read_spans,
    trim_heads,
)


def top(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    ids = np.argsort(-logp, axis=1, kind="stable")[:, :k]
    return ids.astype(np.int32), np.take_along_axis(logp, ids, axis=1).astype(np.float32)


@given(
    rows=st.integers(1, 6),
    tokens=st.integers(1, 20),
    eps=st.sampled_from([0.0, 1e-3, 0.1, 0.9]),
    scale=st.floats(0.1, 8.0),
    seed=st.integers(0, 1000),
)
@settings(deadline=None)
def test_a_head_is_the_smallest_set_that_holds_the_mass(rows, tokens, eps, scale, seed):
    logits = scale * np.random.default_rng(seed).standard_normal((rows, 20))
    ids, logp = top(logits, tokens)
    offsets, head_ids, head_logp, whole = trim_heads(ids, logp, Head(tokens, eps, False, 20))
    assert not whole
    assert offsets[0] == 0
    assert offsets[-1] == head_ids.size == head_logp.size
    for row in range(rows):
        kept = slice(offsets[row], offsets[row + 1])
        size = offsets[row + 1] - offsets[row]
        np.testing.assert_array_equal(head_ids[kept], ids[row, :size])
        mass = np.exp(head_logp[kept], dtype=np.float64)
        assert mass.sum() >= 1 - eps or size == tokens
        assert mass[:-1].sum() < 1 - eps


def test_a_truncated_distribution_is_reported_in_full():
    logp = np.full((2, 6), -np.inf, np.float32)
    logp[0, :3] = np.log([0.5, 0.4995, 0.0005])
    logp[1, 0] = 0.0
    ids = np.tile(np.arange(6, dtype=np.int32), (2, 1))
    offsets, head_ids, head_logp, whole = trim_heads(ids, logp, Head(4, 0.5, True, 100))
    assert whole
    assert offsets.tolist() == [0, 3, 4]
    assert head_ids.tolist() == [0, 1, 2, 0]
    assert np.isfinite(head_logp).all()


def test_a_support_that_does_not_fit_is_an_error():
    ids, logp = top(np.zeros((3, 50)), 40)
    with pytest.raises(LogProbError, match="more than 40 tokens can be drawn at 3 positions"):
        trim_heads(ids, logp, Head(8, 1e-3, True, 50))
    ids, logp = top(np.zeros((3, 40)), 40)
    assert trim_heads(ids, logp, Head(8, 1e-3, True, 40))[3]


def test_more_tokens_are_requested_where_ties_can_widen_the_support():
    assert Head(64, 1e-3, False, 50_000).requested == 64
    assert Head(64, 1e-3, True, 50_000).requested == 96
    assert Head(64, 1e-3, True, 70).requested == 70


def flat(rows: list[list[tuple[int, float | None]]]) -> SimpleNamespace:
    """The fields of vLLM's FlatLogprobs; integration/sampler reads real ones."""
    ends = np.cumsum([len(row) for row in rows]).tolist()
    pairs = [pair for row in rows for pair in row]
    return SimpleNamespace(
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
        token_ids=[token for token, _ in pairs],
        logprobs=[value for _, value in pairs],
    )


HEAD = Head(2, 1e-3, False, 50)
GOOD = [[(7, -2.0), (3, -0.2), (7, -2.0)], [(3, -0.1), (3, -0.1), (9, -3.0)]]


def test_the_drawn_token_comes_first():
    drawn, ids, values = read_logprobs(flat(GOOD), [7, 3], HEAD)
    np.testing.assert_allclose(drawn, [-2.0, -0.1])
    assert ids.tolist() == [[3, 7], [3, 9]]
    np.testing.assert_allclose(values, [[-0.2, -2.0], [-0.1, -3.0]])


@pytest.mark.parametrize("value", [float("nan"), None, float("inf"), float("-inf"), 0.5])
def test_an_invalid_log_probability_is_rejected(value):
    rows = [list(row) for row in GOOD]
    rows[1][0] = (3, value)
    with pytest.raises(LogProbError, match="token 3 at position 1"):
        read_logprobs(flat(rows), [7, 3], HEAD)


@pytest.mark.parametrize("value", [float("nan"), None])
def test_a_head_with_nan_is_rejected(value):
    rows = [list(row) for row in GOOD]
    rows[1][1] = (3, value)
    with pytest.raises(LogProbError, match="top tokens are NaN"):
        read_logprobs(flat(rows), [7, 3], HEAD)


def test_missing_positions_and_different_tokens_are_rejected():
    with pytest.raises(LogProbError, match="2 tokens came with"):
        read_logprobs(flat(GOOD[:1]), [7, 3], HEAD)
    with pytest.raises(LogProbError, match="expected 2 positions of 3 tokens"):
        read_logprobs(flat([GOOD[0][:2], GOOD[1][:2]]), [7, 3], HEAD)
    with pytest.raises(LogProbError, match="different tokens"):
        read_logprobs(flat(GOOD), [7, 4], HEAD)


def span(start, end, version):
    return SimpleNamespace(start=start, end=end, version=version)


def test_versions_are_integers_and_cover_every_token():
    assert read_spans([span(0, 2, "7"), span(2, 5, "8")], 5) == ((0, 2, 7), (2, 5, 8))
    for bad in ([], None, [span(0, 4, "7")], [span(1, 5, "7")], [span(0, 2, "7"), span(3, 5, "8")]):
        with pytest.raises(LogProbError, match="do not cover all 5 tokens"):
            read_spans(bad, 5)
    with pytest.raises(LogProbError, match="before a weight version"):
        read_spans([span(0, 5, "default")], 5)


def test_a_generation_is_made_of_arrays():
    output = SimpleNamespace(
        token_ids=[7, 3], logprobs=flat(GOOD), finish_reason="stop", weight_versions=[span(0, 2, "4")]
    )
    generation = build_generation(output, HEAD)
    assert generation.token_ids.dtype == np.int32
    assert generation.logp.dtype == generation.head_logp.dtype == np.float32
    assert generation.head_offsets.tolist() == [0, 2, 4]
    assert generation.spans == ((0, 2, 4),)
