"""Weighted scores with a centre: what most corrections are composed of.

A ratio to a reference, a clip that makes it a weight, a centre. The gradient of a loss is minus the
estimator in the method's `formula`; its value has no meaning, because weights and centring coefficients are
detached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leeway.corrections.batch import TokenBatch
from leeway.corrections.clips import TokenWeight
from leeway.corrections.primitives import (
    centre_surrogate,
    head_probabilities,
    masked,
    per_response,
    ratio,
    tail_ratios,
)
from leeway.metrics.areas.correction import (
    CENTER_ABS_COEF_SUM,
    CENTER_HEAD_MASS_MU,
    CENTER_RHO_MU,
    WEIGHT_CLIPPED,
    WEIGHT_MEAN,
    WEIGHT_SQ_MEAN,
)

Metrics = dict[str, Tensor]
"""Means over the trained tokens of the batch; batches combine by token-weighted means."""
PerToken = tuple[Tensor, Metrics]
"""(loss [N], metrics)"""


def weighted(batch: TokenBatch, weight: TokenWeight, centre: str = "none", level: str = "token") -> PerToken:
    """A [ w s(a) - centre ] with w = f(pi_theta / pi_ref; A); `centre` as in `centring`.

    `level`: token, or sequence for the weight of the product of a response's ratios, without a centre.
    """
    if level == "sequence":
        return sequence_weighted(batch, weight)
    advantage = batch.advantages.detach()
    logp_ref, head_ref = reference(batch, weight.ref)
    r = ratio(batch.logp, logp_ref)
    w = weight.f(r, advantage)
    direct = w * batch.logp
    metrics = weight_metrics(w, weight.free(r, advantage), batch.mask)
    if centre == "none":
        return -advantage * direct, metrics
    if head_ref is None:
        raise ValueError(f"centring of a ratio to {weight.ref} needs its head log-probabilities in the batch")
    centred, more = centring(batch, centre, weight, w, head_ref)
    metrics |= {name: token_mean(value, batch.mask) for name, value in more.items()}
    return -advantage * (direct - centred), metrics


def centring(
    batch: TokenBatch, kind: str, weight: TokenWeight, w: Tensor, head_ref: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """[N] sum_v sg(c(v)) log pi_theta(v), whose gradient is the centre sum_v c(v) s(v), and metrics [N].

        discrepancy   E_mu[w s] - E_ref[w s]       weighted   E_mu[w s]       plain   w(a) E_mu[s]

    Off the head mu is not reported and is modelled:
    - as kappa pi_s, kappa = (1-Qm)/(1-Qs), when the batch has `tail_logp`, which holds the sum over the tail;
    - else as proportional to pi_theta, like pi_ref. The tail's part is then alpha E_{pi_theta}[s; tail] =
      -alpha E_{pi_theta}[s; head] and only head log-probabilities are needed. For `discrepancy` alpha is
      (rho_mu - rho_ref) f(1/rho_ref): the tail's coefficients add up to at most the difference of the two
      heads' masses, itself at most head_eps plus the discrepancy.
    """
    if not batch.has_head():
        raise ValueError(f"centring ({kind}) needs head_logp_mu, head_logp and head_logp_sync in the batch")
    assert batch.head_logp is not None
    mu, pi, pi_s, mask = head_probabilities(batch)
    ref = masked(torch.exp(head_ref.detach()), mask)
    advantage = batch.advantages.detach()[:, None]
    w_head = masked(weight.f(ratio(batch.head_logp, head_ref), advantage), mask)
    if kind == "discrepancy":
        on_head = (mu - ref) * w_head
    elif kind == "weighted":
        on_head = mu * w_head
    else:
        on_head = w[:, None] * mu
    has_tail, (rho_mu, rho_ref) = tail_ratios(batch, pi, mu, ref)
    metrics: Metrics = {CENTER_HEAD_MASS_MU: mu.sum(1), CENTER_RHO_MU: rho_mu[:, 0]}
    if batch.tail_logp is not None:
        _, (kappa_mu, kappa_ref) = tail_ratios(batch, pi_s, mu, ref)
        share = {"discrepancy": kappa_mu - kappa_ref, "weighted": kappa_mu}.get(kind, w[:, None] * kappa_mu)
        tail = (has_tail * share)[:, 0] * batch.tail_logp
        metrics[CENTER_ABS_COEF_SUM] = on_head.abs().sum(1)
        return centre_surrogate(batch, on_head, mask) + tail, metrics
    w_tail = weight.f(1 / rho_ref, advantage)
    if kind == "discrepancy":
        alpha = (rho_mu - rho_ref) * w_tail
    elif kind == "weighted":
        alpha = rho_mu * w_tail
    else:
        alpha = w[:, None] * rho_mu
    coefficients = on_head - has_tail * alpha * pi
    metrics[CENTER_ABS_COEF_SUM] = coefficients.abs().sum(1)
    return centre_surrogate(batch, coefficients, mask), metrics


def sequence_weighted(batch: TokenBatch, weight: TokenWeight) -> PerToken:
    """A W s(a), W = f(prod_t pi_theta/pi_ref), the same for all tokens of a response."""
    advantage = batch.advantages.detach()
    logp_ref, _ = reference(batch, weight.ref)
    log_w = per_response((batch.logp - logp_ref).detach(), batch)
    r = ratio(log_w, torch.zeros_like(log_w))
    w = weight.f(r, advantage)
    return -advantage * w * batch.logp, weight_metrics(w, weight.free(r, advantage), batch.mask)


def reference(batch: TokenBatch, name: str) -> tuple[Tensor, Tensor | None]:
    """(log pi_ref(a) [N], log pi_ref(head) [N, K] or None) of mu, sync or prox."""
    if name == "mu":
        return batch.logp_mu, batch.head_logp_mu
    if name == "sync":
        return batch.logp_sync, batch.head_logp_sync
    return batch.prox(), None


def weight_metrics(w: Tensor, free: Tensor, mask: Tensor) -> Metrics:
    """Mean and mean square of the weights w [N] (mean^2 / mean square: their ESS), share that was clipped."""
    return {
        WEIGHT_MEAN: token_mean(w, mask),
        WEIGHT_SQ_MEAN: token_mean(w * w, mask),
        WEIGHT_CLIPPED: token_mean((w != free).to(w.dtype), mask),
    }


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x [N] over the tokens of mask."""
    return masked(x, mask).sum() / mask.sum().clamp_min(1)
