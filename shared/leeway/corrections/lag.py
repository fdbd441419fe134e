"""Effective sample size of the lag ratio, its Gaussian prediction, and a step's lag and discrepancy.

Always from raw ratios: a clipped ratio hides exactly what ESS measures.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from leeway.config.correction import CorrectionConfig
from leeway.corrections.clips import f_ppo
from leeway.corrections.primitives import masked
from leeway.metrics.areas.discrepancy import (
    DISC_ABS_MAX,
    DISC_ABS_MEAN,
    DISC_BEYOND_20,
    DISC_KL,
    DISC_MEAN,
    DISC_RATIO_MEAN,
    DISC_RATIO_STD,
)
from leeway.metrics.areas.lag import (
    LAG_ABS_MAX,
    LAG_BEYOND_20,
    LAG_CLIP_FRACTION,
    LAG_ESS_GEO,
    LAG_ESS_SEQ,
    LAG_ESS_TOK,
    LAG_KL,
    LAG_PREDICTED_ESS_SEQ,
    LAG_PREDICTED_ESS_TOK,
    LAG_TAIL_FACTOR,
    LAG_VAR,
    LAG_VAR_SEQ,
)

Level = Literal["token", "sequence", "geometric"]
NO_LAG = 1e-9
"""Variance of a log-ratio, nats^2, that is rounding: log-probabilities in float32 differ by 1e-6 or so."""


def pooled_log_ratio(log_ratio: Tensor, mask: Tensor, seq_ids: Tensor, level: Level) -> Tensor:
    """Log-ratios of the units that ESS counts, float64 [n].

    token: each trained token; sequence: sum over a response; geometric: mean over a response.
    Responses without a trained token are left out.
    """
    values = log_ratio.detach().double()[mask]
    if level == "token":
        return values
    _, inverse = torch.unique(seq_ids[mask], return_inverse=True)
    count = int(inverse.max()) + 1 if inverse.numel() else 0
    zeros = torch.zeros(count, dtype=torch.float64, device=values.device)
    sums = zeros.index_add(0, inverse, values)
    if level == "sequence":
        return sums
    if level == "geometric":
        return sums / zeros.index_add(0, inverse, torch.ones_like(values))
    raise ValueError(f"ESS level {level!r}: expected token, sequence or geometric")


def ess(log_ratio: Tensor, mask: Tensor, seq_ids: Tensor, level: Level = "token") -> float:
    """ESS / n = (sum w)^2 / (n sum w^2) in [1/n, 1], w = exp(log_ratio); 1.0 for an empty batch.

    log_ratio [N] nats, mask [N] bool, seq_ids [N]. In log space: stable for any finite log-ratio. Raises
    ValueError when a log-ratio of a trained token is not finite.
    """
    pooled = pooled_log_ratio(log_ratio, mask, seq_ids, level)
    bad = int((~torch.isfinite(pooled)).sum())
    if bad:
        raise ValueError(f"{bad} of {pooled.numel()} log-ratios are not finite: there is no ESS")
    if pooled.numel() == 0:
        return 1.0
    log_share = 2 * torch.logsumexp(pooled, 0) - torch.logsumexp(2 * pooled, 0) - math.log(pooled.numel())
    return min(1.0, float(log_share.exp()))


def predict_ess(log_ratio: Tensor) -> float:
    """Gaussian prediction exp(-Var) of ESS / n from pooled log-ratios [n]."""
    return math.exp(-variance(log_ratio))


def variance(x: Tensor) -> float:
    """Population variance, 0 for fewer than two values."""
    return float(x.double().var(correction=0)) if x.numel() > 1 else 0.0


def tail_factor(ess_share: float, var: float) -> float:
    """-log(ESS) / Var: 1 for a Gaussian log-ratio, above 1 for a heavier tail (0/0 reads as 1)."""
    return -math.log(max(ess_share, 1e-300)) / var if var > NO_LAG else 1.0


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r, r = exp(log_ratio): its mean over x ~ p is KL(p || q) when log_ratio = log q - log p."""
    return torch.expm1(log_ratio) - log_ratio


def kl_rao_blackwell(logp: Tensor, logq: Tensor) -> Tensor:
    """[...] KL(p || q) in nats at each prefix, summed over the vocabulary; logp, logq: [..., V], normalised.

    At prefixes drawn from p its sum over a response is unbiased for the KL of the sequences, never negative,
    and varies less than log p(a) - log q(a) (arXiv 2504.10637). Tokens with p = 0 add nothing.
    """
    p = logp.exp()
    return masked(p * (logp - logq), p > 0).sum(-1)


def predict_crossing(var: float, age: float, threshold: float = 0.5) -> float:
    """Age in optimiser steps at which a Gaussian log-ratio's ESS falls to `threshold`; infinity for no lag.

    From the variance of the log-ratio at `age`, taken to grow with the square of the age (aligned updates):
    ESS = exp(-var), so the crossing is at age sqrt(ln(1/threshold) / var). A heavier tail crosses earlier.
    """
    return age * math.sqrt(-math.log(threshold) / var) if var > NO_LAG and age > 0 else math.inf


def lag_metrics(
    logp: Tensor,
    logp_sync: Tensor,
    logp_mu: Tensor,
    mask: Tensor,
    seq_ids: Tensor,
    advantages: Tensor,
    config: CorrectionConfig,
) -> dict[str, float]:
    """Lag and discrepancy of a whole batch (all ranks, all micro-batches); every input is [N].

    Raises ValueError when a log-ratio of a trained token is not finite.
    """
    lag = (logp - logp_sync).detach().double()
    discrepancy = (logp_sync - logp_mu).detach().double()
    for name, value in (("lag", lag), ("discrepancy", discrepancy)):
        bad = int((~torch.isfinite(value[mask])).sum())
        if bad:
            raise ValueError(f"{bad} of {int(mask.sum())} {name} log-ratios are not finite")
    seq_lag = pooled_log_ratio(lag, mask, seq_ids, "sequence")
    lag_var = variance(lag[mask])
    ess_tok, ess_seq = (ess(lag, mask, seq_ids, level) for level in ("token", "sequence"))
    trained, delta = lag[mask], discrepancy[mask]
    clipped = _clipped(trained, advantages.detach()[mask], config)
    count = max(int(mask.sum()), 1)
    ratio = torch.exp(delta.clamp(-20, 20))
    return {
        LAG_ESS_TOK: ess_tok,
        LAG_ESS_SEQ: ess_seq,
        LAG_ESS_GEO: ess(lag, mask, seq_ids, "geometric"),
        LAG_VAR: lag_var,
        LAG_VAR_SEQ: variance(seq_lag),
        LAG_PREDICTED_ESS_TOK: math.exp(-lag_var),
        LAG_PREDICTED_ESS_SEQ: predict_ess(seq_lag),
        LAG_TAIL_FACTOR: tail_factor(ess_tok, lag_var),
        LAG_KL: float(k3(trained.clamp(-20, 20)).sum()) / count,
        LAG_CLIP_FRACTION: float(clipped.sum()) / count,
        LAG_BEYOND_20: float((trained.abs() > 20).sum()),
        LAG_ABS_MAX: float(trained.abs().max()) if trained.numel() else 0.0,
        DISC_ABS_MEAN: float(delta.abs().sum()) / count,
        DISC_MEAN: float(delta.sum()) / count,
        DISC_KL: float(k3(delta.clamp(-20, 20)).sum()) / count,
        DISC_ABS_MAX: float(delta.abs().max()) if delta.numel() else 0.0,
        DISC_BEYOND_20: float((delta.abs() > 20).sum()),
        DISC_RATIO_MEAN: float(ratio.mean()) if ratio.numel() else 1.0,
        DISC_RATIO_STD: float(ratio.std(correction=0)) if ratio.numel() else 0.0,
    }


def _clipped(lag: Tensor, advantages: Tensor, config: CorrectionConfig) -> Tensor:
    """[n] bool: PPO's clip would zero the token's gradient; the range is the method's, or PPO's default."""
    r = torch.exp(lag.clamp(-20, 20))
    weight = f_ppo(*config.ppo_clip)(r, advantages)
    return (weight == 0) & (advantages != 0)
