"""What all corrections are composed of: ratio, head and tail, centre, aggregation.

Symbols as in the literature: w, wbar are detached weights, r = pi_theta / pi_ref, A the advantage,
s(v) = grad log pi_theta(v), H the head (reported top tokens of mu), P, Qm, Qs the head's mass under
pi_theta, mu, pi_s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leeway.corrections.batch import TokenBatch
from leeway.corrections.clips import Clip

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 4.9e8: beyond this a ratio is clamped so that float32 cannot overflow."""
TAIL_FLOOR = 1e-6
"""Minimum tail mass (e in the formulas)."""


def ratio(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """sg(pi_theta / pi_ref), clamped to exp(+-20); any shape."""
    return torch.exp((logp - logp_ref).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """x where mask, else 0, also where x is not finite (a product with 0 would keep NaN)."""
    return x if mask is None else torch.where(mask, x, torch.zeros_like(x))


def head_probabilities(batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mu, pi_theta, pi_s on the head (each [N, K], detached, 0 on padding) and the mask [N, K].

    Negative ids are padding too. A token id that is duplicated at a position counts once.
    """
    assert batch.head_logp_mu is not None and batch.head_logp is not None and batch.head_logp_sync is not None
    mask = torch.ones_like(batch.head_logp_mu, dtype=torch.bool)
    if batch.head_mask is not None:
        mask = mask & batch.head_mask
    if batch.head_ids is not None:
        mask = mask & (batch.head_ids >= 0)
        mask = mask & ~_repeated(batch.head_ids, mask)
    mu, pi, pi_s = (
        masked(torch.exp(x.detach()), mask)
        for x in (batch.head_logp_mu, batch.head_logp, batch.head_logp_sync)
    )
    return mu, pi, pi_s, mask


def _repeated(ids: Tensor, mask: Tensor) -> Tensor:
    """[N, K] bool: the same id occurs earlier in the row, unmasked."""
    unique_padding = -1 - torch.arange(ids.shape[1], device=ids.device)
    keyed = torch.where(mask, ids, unique_padding)
    order = torch.argsort(keyed, dim=1, stable=True)
    in_order = keyed.gather(1, order)
    repeated = torch.zeros_like(mask)
    repeated[:, 1:] = in_order[:, 1:] == in_order[:, :-1]
    return torch.zeros_like(mask).scatter(1, order, repeated)


def tail_ratios(batch: TokenBatch, pi: Tensor, *others: Tensor) -> tuple[Tensor, list[Tensor]]:
    """1[there is a tail] and (1-Q)/(1-P) for each of `others` on the head; each [N, 1].

    Off the head every distribution is modelled as proportional to `pi` (pi_theta or pi_s). Two ratios are
    exactly equal where both tails are below the floor.
    """
    tail = (1 - pi.sum(1, keepdim=True)).clamp_min(TAIL_FLOOR)
    ratios = [(1 - q.sum(1, keepdim=True)).clamp_min(TAIL_FLOOR) / tail for q in others]
    has_tail = torch.ones_like(tail)
    if batch.head_ids is None:
        has_tail = torch.zeros_like(tail)
    elif batch.support_complete is not None:
        has_tail = (~batch.support_complete).to(tail.dtype)[:, None]
    return has_tail, ratios


def tail_surrogate(
    logp: Tensor,
    logp_sync: Tensor,
    head_ids: Tensor,
    head_mask: Tensor,
    advantages: Tensor,
    kappa_ref: Tensor,
    f: Clip,
) -> Tensor:
    """[n] sum over v off the head of sg(pi_s(v) f(pi_theta(v) / (kappa_ref pi_s(v)); A)) log pi_theta(v).

    logp (with gradient), logp_sync: [n, V]; head_ids, head_mask: [n, K]; advantages, kappa_ref: [n].
    """
    w = f(ratio(logp, logp_sync + kappa_ref.log()[:, None]), advantages[:, None])
    on_head = torch.zeros_like(logp, dtype=torch.int8)
    on_head.scatter_reduce_(1, head_ids.clamp_min(0), head_mask.to(torch.int8), "amax")
    coefficients = masked(torch.exp(logp_sync) * w, on_head == 0)
    return (coefficients.detach() * logp).sum(1)


def tail_kappa(head_ids: Tensor, mask: Tensor, head_logp_mu: Tensor, head_logp_sync: Tensor) -> Tensor:
    """[n] (1-Qm)/(1-Qs): how much more mass mu has off the head than pi_s; inputs [n, K]."""
    mask = mask & ~_repeated(head_ids, mask)
    tail_mu, tail_s = (
        (1 - masked(torch.exp(x), mask).sum(1)).clamp_min(TAIL_FLOOR) for x in (head_logp_mu, head_logp_sync)
    )
    return tail_mu / tail_s


def centre_surrogate(batch: TokenBatch, coefficients: Tensor, mask: Tensor) -> Tensor:
    """[N] sum_v sg(coefficients) log pi_theta(v) over the head; its gradient is sum_v c(v) s(v)."""
    assert batch.head_logp is not None
    return (coefficients.detach() * masked(batch.head_logp, mask)).sum(1)


def per_response(x: Tensor, batch: TokenBatch, *, mean: bool = False) -> Tensor:
    """[N] sum (or mean) of x over the trained tokens of each token's own response."""
    _, inverse = torch.unique(batch.seq_ids, return_inverse=True)
    sums = torch.zeros(int(inverse.max()) + 1 if inverse.numel() else 0, dtype=x.dtype, device=x.device)
    total = sums.index_add(0, inverse, masked(x, batch.mask))[inverse]
    return total / batch.seq_lengths().clamp_min(1) if mean else total


def aggregate(per_token: Tensor, batch: TokenBatch, mode: str) -> Tensor:
    """Sum of `per_token` [N] under the denominators of the global batch.

    token-mean: / tokens; seq-mean-token-mean: mean in a response, then / responses;
    seq-mean-token-sum: / responses; constant: / (responses x longest allowed response).
    """
    per_token = masked(per_token, batch.mask)
    counts = batch.denominators
    if mode == "token-mean":
        return per_token.sum() / max(counts.tokens, 1)
    if mode == "seq-mean-token-mean":
        return (per_token / batch.seq_lengths().clamp_min(1)).sum() / max(counts.sequences, 1)
    if mode == "seq-mean-token-sum":
        return per_token.sum() / max(counts.sequences, 1)
    if mode == "constant":
        return per_token.sum() / max(counts.sequences * counts.max_tokens, 1)
    raise ValueError(
        f"aggregation {mode!r}: expected token-mean, seq-mean-token-mean, seq-mean-token-sum, constant"
    )
