"""The corrections by name. Each is one function from a TokenBatch to a per-token loss.

The gradient of the loss is minus the estimator in the method's `formula`; its value has no meaning, because
weights and centring coefficients are detached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leeway.config import CorrectionConfig
from leeway.corrections.batch import TokenBatch
from leeway.corrections.primitives import (
    Clip,
    aggregate,
    centre_surrogate,
    f_clamp,
    f_identity,
    f_ppo,
    head_probabilities,
    masked,
    ratio,
    tail_ratios,
)

Metrics = dict[str, Tensor]
"""Means over the trained tokens of the batch; batches combine by token-weighted means."""
PerToken = tuple[Tensor, Metrics]


@dataclass(frozen=True)
class Method:
    """A correction: `loss(batch, config)` gives the per-token loss [N] and metrics."""

    name: str
    formula: str
    needs: tuple[str, ...]
    """Of: logp_mu, logp_sync, head."""
    source: str
    loss: Callable[[TokenBatch, CorrectionConfig], PerToken]


def lag_clip(config: CorrectionConfig) -> Clip:
    """The clip of the lag ratio that the configuration names."""
    if config.lag_clip == "ppo":
        return f_ppo(config.clip_low, config.clip_high, config.dual_clip)
    if config.lag_clip == "clamp":
        return f_clamp(config.clamp_low, config.clamp_high)
    return f_identity()


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x [N] over the tokens of mask."""
    return masked(x, mask).sum() / mask.sum().clamp_min(1)


def dlc(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """Discrepancy-lag correction: clip the lag, centre the discrepancy at each prefix.

        ghat = A [ wbar(a) s(a) - centre ],   wbar = f(pi_theta / pi_s; sign A)
        centre   discrepancy   E_mu[wbar s] - E_{pi_s}[wbar s]      (default)
                 weighted      E_mu[wbar s]
                 plain         wbar(a) E_mu[s]
                 none          0

    Off the head mu and pi_s are taken as proportional to pi_theta, so the tail's part of the centre is
    alpha E_{pi_theta}[s; tail] = -alpha E_{pi_theta}[s; head] and only head log-probabilities are needed.
    For `discrepancy` alpha = (rho_mu - rho_s) f(1/rho_s): the tail's coefficients add up to at most
    |Qs - Qm|, the difference of the two heads' masses, itself at most head_eps plus the discrepancy.
    """
    f = lag_clip(config)
    advantage = batch.advantages.detach()
    r = ratio(batch.logp, batch.logp_sync)
    wbar = f(r, advantage)
    direct = wbar * batch.logp
    metrics: Metrics = {"lag/weight_mean": token_mean(wbar, batch.mask)}
    if config.centering == "none":
        return -advantage * direct, metrics
    coefficients, head_mask, centre_metrics = _centring(batch, config.centering, f, wbar)
    metrics |= {name: token_mean(value, batch.mask) for name, value in centre_metrics.items()}
    return -advantage * (direct - centre_surrogate(batch, coefficients, head_mask)), metrics


def _centring(
    batch: TokenBatch, kind: str, f: Clip, wbar: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Coefficients c(v) [N, K] of the centre sum_v c(v) s(v), the head's mask, and metrics [N]."""
    if not batch.has_head():
        raise ValueError(f"centering={kind} needs head_logp_mu, head_logp and head_logp_sync in the batch")
    assert batch.head_logp is not None and batch.head_logp_sync is not None
    mu, pi, pi_s, mask = head_probabilities(batch)
    rho_mu, rho_s, has_tail = tail_ratios(batch, mu, pi, pi_s)
    advantage = batch.advantages.detach()[:, None]
    w_head = masked(f(ratio(batch.head_logp, batch.head_logp_sync), advantage), mask)
    w_tail = f(1 / rho_s, advantage)
    if kind == "discrepancy":
        on_head, alpha = (mu - pi_s) * w_head, (rho_mu - rho_s) * w_tail
    elif kind == "weighted":
        on_head, alpha = mu * w_head, rho_mu * w_tail
    else:
        on_head, alpha = wbar[:, None] * mu, wbar[:, None] * rho_mu
    coefficients = on_head - has_tail * alpha * pi
    return (
        coefficients,
        mask,
        {
            "center/abs_coef_sum": on_head.abs().sum(1),
            "center/head_mass_mu": mu.sum(1),
            "center/rho_mu": rho_mu[:, 0],
        },
    )


def none(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """No correction (asynchronous GRPO as is): ghat = A s(a)."""
    return -batch.advantages.detach() * batch.logp, {}


def importance_sampling(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """Importance sampling: ghat = A w s(a), w = pi_theta(a)/mu(a), or its product over the response."""
    log_w = (batch.logp - batch.logp_mu).detach()
    if config.is_level == "sequence":
        _, inverse = torch.unique(batch.seq_ids, return_inverse=True)
        sums = torch.zeros(int(inverse.max()) + 1 if inverse.numel() else 0, dtype=log_w.dtype)
        log_w = sums.to(log_w.device).index_add(0, inverse, masked(log_w, batch.mask))[inverse]
    w = ratio(log_w, torch.zeros_like(log_w))
    return -batch.advantages.detach() * w * batch.logp, {"is/weight_mean": token_mean(w, batch.mask)}


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "dlc",
            "A [ f(pi_theta/pi_s) s(a) - (E_mu - E_pi_s)[ f(pi_theta/pi_s) s ] ]",
            ("logp_mu", "logp_sync", "head"),
            "discrepancy-lag correction",
            dlc,
        ),
        Method("none", "A s(a)", (), "GRPO (arXiv 2402.03300), asynchronous", none),
        Method("is", "A pi_theta(a)/mu(a) s(a)", ("logp_mu",), "importance sampling", importance_sampling),
    )
}


def surrogate_loss(method: str, batch: TokenBatch, config: CorrectionConfig) -> tuple[Tensor, Metrics]:
    """The loss to minimise (scalar) and metrics (token means) of a method on a batch.

    Partial batches add up: the losses of all micro-batches and ranks sum to the loss of the global batch.
    Raises ValueError for an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"correction.method {method!r}: expected one of {', '.join(METHODS)}")
    per_token, metrics = METHODS[method].loss(batch.without_untrained(), config)
    return aggregate(per_token, batch, config.aggregation), metrics
