"""Generation: a finished response as arrays, and how it is read and checked from vLLM's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from leeway.errors import LeewayError
from leeway.messages import draw_digest

FinishReason = Literal["stop", "length"]
Span = tuple[int, int, int]
TIE_MARGIN = 32
"""Tokens requested beyond top_k: vLLM keeps every token that ties with the last of the top k."""


class LogProbError(LeewayError):
    """The engine reported invalid log-probabilities, or fewer than requested."""


@dataclass(frozen=True)
class Head:
    """What the sampler reports per token: up to `tokens` tokens that hold a mass of 1 - `eps`.

    `truncated`: sampling settings cut the distribution, and its whole support is reported. `vocab_size`:
    columns of the engine's logits.
    """

    tokens: int
    eps: float
    truncated: bool
    vocab_size: int

    @property
    def requested(self) -> int:
        """Top tokens to request from the engine. One -inf among them proves that a support is complete."""
        return min(self.vocab_size, self.tokens + (TIE_MARGIN if self.truncated else 0))


@dataclass(frozen=True)
class Generation:
    """A finished response of T tokens, including the final EOS token if it was drawn.

    token_ids i32 [T]; logp f32 [T], log mu of each drawn token in nats; the head of mu at each token, most
    likely first: head_offsets i32 [T+1], head_ids i32 [M], head_logp f32 [M]. `spans`: (start, end, version).
    """

    token_ids: NDArray[np.int32]
    logp: NDArray[np.float32]
    head_offsets: NDArray[np.int32]
    head_ids: NDArray[np.int32]
    head_logp: NDArray[np.float32]
    finish_reason: FinishReason
    spans: tuple[Span, ...]
    support_complete: bool
    """Whether every head is the complete distribution that its token was drawn from."""
    digest: str = ""
    """`draw_digest` of tokens and log-probabilities, as the engine returned them."""


def trim_heads(
    ids: NDArray[np.int32], logp: NDArray[np.float32], head: Head
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32], bool]:
    """Trim sorted top tokens [T, K] to ragged heads: (offsets [T+1], ids [M], logp [M], complete).

    Full distribution: the smallest set with mass >= 1 - eps, at most `tokens`. Truncated distribution: all
    tokens with a probability above 0. Raises LogProbError when a support does not fit in K tokens or a value
    is not finite.
    """
    rows, width = logp.shape
    if head.truncated:
        drawable = logp > -np.inf
        counts = drawable.sum(axis=1)
        whole = width == head.vocab_size or bool((counts < width).all())
        if not whole:
            raise LogProbError(
                f"more than {width} tokens can be drawn at {int((counts == width).sum())} positions, so "
                "their support cannot be reported in full: lower sampling.top_k or raise sampling.head_tokens"
            )
    else:
        whole = False
        mass = np.cumsum(np.exp(logp, dtype=np.float64), axis=1)
        counts = np.minimum((mass < 1.0 - head.eps).sum(axis=1) + 1, width)
    keep = np.arange(width) < counts[:, None]
    offsets = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    kept = logp[keep]
    if not np.isfinite(kept).all() or (kept.size and kept.max() > 1e-3):
        bad = kept[~np.isfinite(kept) | (kept > 1e-3)]
        raise LogProbError(f"{bad.size} of {kept.size} head log-probabilities are invalid, such as {bad[0]}")
    return offsets, ids[keep], kept, whole


def read_logprobs(flat: Any, tokens: Sequence[int], head: Head) -> tuple[NDArray[Any], ...]:
    """vLLM's FlatLogprobs of one response as (logp [T], top ids [T, K], top logp [T, K]).

    Each position has the drawn token first, then the top K. Raises LogProbError for missing positions or
    tokens, for a drawn token that differs from `tokens`, for a log-probability of a drawn token that is NaN,
    null, infinite or positive, and for NaN or null among the top K.
    """
    width, count = head.requested + 1, len(tokens)
    sizes = np.subtract(flat.end_indices, flat.start_indices)
    if sizes.size != count or (sizes != width).any():
        raise LogProbError(
            f"{count} tokens came with log-probabilities for {sizes.size} positions of {set(sizes.tolist())} "
            f"tokens each; expected {count} positions of {width} tokens"
        )
    ids = np.array(flat.token_ids, dtype=np.int32).reshape(count, width)
    values = np.array(flat.logprobs, dtype=np.float32).reshape(count, width)  # null becomes NaN
    drawn = values[:, 0]
    if (ids[:, 0] != np.asarray(tokens, dtype=np.int32)).any():
        raise LogProbError("the engine's log-probabilities belong to different tokens from the ones it drew")
    valid = np.isfinite(drawn) & (drawn <= 1e-3)
    if not valid.all():
        at = int(np.argmin(valid))
        raise LogProbError(
            f"the log-probability of token {int(tokens[at])} at position {at} is {drawn[at]}; "
            f"{int((~valid).sum())} of {count} are invalid"
        )
    if np.isnan(values).any():
        raise LogProbError(f"{int(np.isnan(values).sum())} log-probabilities of top tokens are NaN")
    return drawn, ids[:, 1:], values[:, 1:]


def read_spans(spans: Any, count: int) -> tuple[Span, ...]:
    """vLLM's weight-version spans as (start, end, version). Raises LogProbError when they leave gaps."""
    found = [(int(s.start), int(s.end), str(s.version)) for s in spans or []]
    if not all(version.isdecimal() for _, _, version in found):
        raise LogProbError(f"tokens were drawn before a weight version was loaded: {found}")
    if [start for start, _, _ in found] + [count] != [0] + [end for _, end, _ in found]:
        raise LogProbError(f"weight versions {found} do not cover all {count} tokens")
    return tuple((start, end, int(version)) for start, end, version in found)


def build_generation(output: Any, head: Head) -> Generation:
    """A finished vLLM CompletionOutput as a Generation. Raises LogProbError."""
    tokens = list(output.token_ids)
    logp, top_ids, top_logp = read_logprobs(output.logprobs, tokens, head)
    offsets, head_ids, head_logp, whole = trim_heads(top_ids, top_logp, head)
    return Generation(
        token_ids=np.array(tokens, dtype=np.int32),
        logp=np.ascontiguousarray(logp),
        head_offsets=offsets,
        head_ids=head_ids,
        head_logp=head_logp,
        finish_reason=cast(FinishReason, output.finish_reason),
        spans=read_spans(output.weight_versions, len(tokens)),
        support_complete=whole,
        digest=draw_digest(np.array(tokens, dtype=np.int32), logp),
    )
