"""The corrections, each one function from a TokenBatch to a per-token loss.

All are composed of the same parts: a ratio to a reference, a clip that makes it a weight, a centre, an
aggregation. The gradient of a loss is minus the estimator in the method's `formula` (registry.py); its value
has no meaning, because weights and centring coefficients are detached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leeway.config import CorrectionConfig
from leeway.corrections.batch import TokenBatch
from leeway.corrections.lag import ess
from leeway.corrections.m2 import budget_clip, suffix_cut, trust_region
from leeway.corrections.primitives import (
    Clip,
    centre_surrogate,
    f_band,
    f_clamp,
    f_identity,
    f_one,
    f_ppo,
    head_probabilities,
    masked,
    per_response,
    ratio,
    tail_ratios,
)

Metrics = dict[str, Tensor]
"""Means over the trained tokens of the batch; batches combine by token-weighted means."""
PerToken = tuple[Tensor, Metrics]
REPO_M2_FLOOR = (0.3, 0.5)
"""The authors' code never clips tighter than [1 - 0.3, 1 + 0.5]."""


@dataclass(frozen=True)
class TokenWeight:
    """A weight w = f(pi_theta / pi_ref; A) of a token; `free` is what it would be if nothing were clipped."""

    ref: str
    """mu, sync or prox."""
    f: Clip
    free: Clip


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x [N] over the tokens of mask."""
    return masked(x, mask).sum() / mask.sum().clamp_min(1)


def weight_metrics(w: Tensor, free: Tensor, mask: Tensor) -> Metrics:
    """Mean and mean square of the weights w [N] (mean^2 / mean square: their ESS), share that was clipped."""
    return {
        "weight/mean": token_mean(w, mask),
        "weight/sq_mean": token_mean(w * w, mask),
        "weight/clipped": token_mean((w != free).to(w.dtype), mask),
    }


# -- weights of tokens ------------------------------------------------------------------------------------


def lag_clip(config: CorrectionConfig) -> Clip:
    """The clip of the lag ratio that the configuration names."""
    if config.lag_clip == "ppo":
        return f_ppo(config.clip_low, config.clip_high, config.dual_clip)
    if config.lag_clip == "clamp":
        return f_clamp(config.clamp_low, config.clamp_high)
    return f_identity()


def weight_of(config: CorrectionConfig) -> TokenWeight | None:
    """The token weight of config.method; None for methods whose weight is not one ratio of the token."""
    one, identity = f_one(), f_identity()
    match config.method:
        case "dlc":
            return TokenWeight("sync", lag_clip(config), identity)
        case "none" | "score_centering":
            return TokenWeight("mu", one, one)
        case "is":
            return TokenWeight("mu", identity, identity)
        case "tis":
            return TokenWeight("mu", f_clamp(config.tis_clip_low, config.tis_clip), identity)
        case "mis" | "icepop":
            f = f_band(config.mis_low, config.mis_high, config.mis_inside, config.mis_outside)
            return TokenWeight("mu", f, identity if config.mis_inside == "ratio" else one)
        case "ppo":
            f = f_ppo(config.clip_low, config.clip_high, config.dual_clip)
            return TokenWeight(config.reference, f, identity)
    return None


def centre_of(config: CorrectionConfig) -> str:
    """Kind of centre that config.method has: discrepancy, weighted, plain or none."""
    if config.method == "dlc":
        return config.centering
    return "weighted" if config.method == "score_centering" or config.score_centering else "none"


def tail_clip(config: CorrectionConfig) -> tuple[str, Clip]:
    """(reference, f) of the weight inside the expectation over the tail of config's centre."""
    weight = weight_of(config)
    assert weight is not None
    return weight.ref, f_one() if centre_of(config) == "plain" else weight.f


def reference(batch: TokenBatch, name: str) -> tuple[Tensor, Tensor | None]:
    """(log pi_ref(a) [N], log pi_ref(head) [N, K] or None) of mu, sync or prox."""
    if name == "mu":
        return batch.logp_mu, batch.head_logp_mu
    if name == "sync":
        return batch.logp_sync, batch.head_logp_sync
    return batch.prox(), None


def weighted(batch: TokenBatch, weight: TokenWeight, centre: str = "none") -> PerToken:
    """A [ w s(a) - centre ] with w = f(pi_theta / pi_ref; A); `centre` as in `centring`."""
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


def by_token(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """A [ w s(a) - centre ]: every method whose weight is one ratio of the token, with its centre.

    none: w = 1, no centre (asynchronous GRPO as is). score_centering: w = 1 (arXiv 2609.20807, eq. 9, 12).
    dlc: w = f(pi_theta/pi_s), the discrepancy is centred. ppo: arXiv 1707.06347, dual clip 1912.09729.
    """
    weight = weight_of(config)
    assert weight is not None
    return weighted(batch, weight, centre_of(config))


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
    metrics = {"center/head_mass_mu": mu.sum(1), "center/rho_mu": rho_mu[:, 0]}
    if batch.tail_logp is not None:
        _, (kappa_mu, kappa_ref) = tail_ratios(batch, pi_s, mu, ref)
        share = {"discrepancy": kappa_mu - kappa_ref, "weighted": kappa_mu}.get(kind, w[:, None] * kappa_mu)
        tail = (has_tail * share)[:, 0] * batch.tail_logp
        metrics["center/abs_coef_sum"] = on_head.abs().sum(1)
        return centre_surrogate(batch, on_head, mask) + tail, metrics
    w_tail = weight.f(1 / rho_ref, advantage)
    if kind == "discrepancy":
        alpha = (rho_mu - rho_ref) * w_tail
    elif kind == "weighted":
        alpha = rho_mu * w_tail
    else:
        alpha = w[:, None] * rho_mu
    coefficients = on_head - has_tail * alpha * pi
    metrics["center/abs_coef_sum"] = coefficients.abs().sum(1)
    return centre_surrogate(batch, coefficients, mask), metrics


# -- weights of responses ---------------------------------------------------------------------------------


def sequence_weighted(batch: TokenBatch, f: Clip, free: Clip) -> PerToken:
    """A W s(a), W = f(prod_t pi_theta/mu), the same for all tokens of a response."""
    advantage = batch.advantages.detach()
    log_w = per_response((batch.logp - batch.logp_mu).detach(), batch)
    r = ratio(log_w, torch.zeros_like(log_w))
    w = f(r, advantage)
    return -advantage * w * batch.logp, weight_metrics(w, free(r, advantage), batch.mask)


def by_level(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """is, tis, mis: w = f(pi_theta/mu) of the token, or f of the product of the ratios of its response."""
    if config.is_level == "token":
        return by_token(batch, config)
    weight = weight_of(config)
    assert weight is not None
    return sequence_weighted(batch, weight.f, weight.free)


# -- clipped surrogates -----------------------------------------------------------------------------------


def loglinear_prox(batch: TokenBatch) -> Tensor:
    """[N] A-3PO's proximal policy (arXiv 2512.06547): log mu + alpha log(pi_theta/mu), alpha = (d-1)/d.

    d is the token's age in optimiser steps; alpha is 0 where d <= 0.
    """
    age = torch.zeros_like(batch.logp) if batch.age is None else batch.age.to(batch.logp.dtype)
    alpha = torch.where(age > 0, (age - 1) / age.clamp_min(1), torch.zeros_like(age))
    return batch.logp_mu + alpha * (batch.logp.detach() - batch.logp_mu)


def proximal(batch: TokenBatch, config: CorrectionConfig) -> Tensor:
    """[N] log pi_prox as the configuration asks for it."""
    return batch.prox() if config.prox_logp_method == "recompute" else loglinear_prox(batch)


def decoupled_weight(batch: TokenBatch, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """[N] weight of decoupled PPO, and what it would be if nothing were clipped.

    w = pi_prox/mu, r = pi_theta/pi_prox. Tokens with w above behave_weight_cap are dropped; denominators keep
    counting them.
    """
    prox = proximal(batch, config)
    behave, r = ratio(prox, batch.logp_mu), ratio(batch.logp, prox)
    w = behave * f_ppo(config.clip_low, config.clip_high, math.inf)(r, batch.advantages.detach())
    if config.behave_weight_cap is not None:
        w = torch.where(behave <= config.behave_weight_cap, w, torch.zeros_like(w))
    return w, behave * r


def decoupled_ppo(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """AReaL's decoupled PPO (arXiv 2110.00641, 2505.24298): w min(r A, clip(r) A)."""
    w, free = decoupled_weight(batch, config)
    return -batch.advantages.detach() * w * batch.logp, weight_metrics(w, free, batch.mask)


def gspo(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """GSPO (arXiv 2507.18071): min(s A, clip(s) A), s = exp(mean_t log pi_theta/pi_ref)."""
    logp_ref, _ = reference(batch, config.reference)
    log_s = per_response((batch.logp - logp_ref).detach(), batch, mean=True)
    advantage = batch.advantages.detach()
    f = f_ppo(config.gspo_clip_low, config.gspo_clip_high, math.inf)
    r = ratio(log_s, torch.zeros_like(log_s))
    w = f(r, advantage)
    return -advantage * w * batch.logp, weight_metrics(w, r, batch.mask)


# -- methods that look at the whole batch -----------------------------------------------------------------


def plan_m2po(batch: TokenBatch, config: CorrectionConfig) -> dict[str, float]:
    """M2PO on the global batch: `cut` on M2, `clip` on |log-ratio| (repo), `kept` share of tokens (areal)."""
    other = proximal(batch, config) if config.m2_variant == "areal" else batch.logp
    log_ratio = (other - batch.logp_mu)[batch.mask].detach()
    m2 = log_ratio**2
    if config.m2_variant == "areal":
        cut = suffix_cut(m2, config.m2_threshold, strict=True)
        return {"cut": cut, "kept": float((m2 <= cut).sum()) / max(m2.numel(), 1)}
    m2 = m2[trust_region(log_ratio, batch.advantages[batch.mask])]
    if config.m2_variant == "repo":
        return {"clip": budget_clip(m2, config.m2_threshold)}
    return {"cut": suffix_cut(m2, config.m2_threshold)}


def m2po(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """M2PO (arXiv 2510.01161): A M r s(a), r = pi_theta/mu, M drops what makes the second moment too large.

    paper: hard mask in the trust region. areal: over all tokens, on pi_prox/mu, keeps decoupled PPO's loss
    and divides by the tokens that are left. repo: PPO's clip with bounds from the budget.
    """
    plan = plan_m2po(batch, config) if batch.plan is None else batch.plan
    advantage = batch.advantages.detach()
    if config.m2_variant == "repo":
        low, high = math.exp(-plan["clip"]), math.exp(min(plan["clip"], 20.0))
        f = f_ppo(max(1 - low, REPO_M2_FLOOR[0]), max(high - 1, REPO_M2_FLOOR[1]), config.dual_clip)
        return weighted(batch, TokenWeight("mu", f, f_identity()))
    if config.m2_variant == "areal":
        keep = (proximal(batch, config) - batch.logp_mu) ** 2 <= plan["cut"]
        w, free = decoupled_weight(batch, config)
        share = max(plan["kept"], 1e-9)
    else:
        log_ratio = (batch.logp - batch.logp_mu).detach()
        keep = ~trust_region(log_ratio, advantage) | (log_ratio**2 <= plan["cut"])
        w = free = ratio(batch.logp, batch.logp_mu)
        share = 1.0
    w = masked(w, keep)
    metrics = weight_metrics(w, free, batch.mask)
    metrics["m2po/masked"] = 1 - token_mean(keep.to(w.dtype), batch.mask)
    return -advantage * w * batch.logp / share, metrics


def vcpo(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """VCPO (arXiv 2602.17616): sequence TIS; the step's learning rate follows the effective sample size."""
    return sequence_weighted(batch, f_clamp(0.0, config.vcpo_clip), f_identity())


def vcpo_lr_scale(batch: TokenBatch, config: CorrectionConfig) -> float:
    """eta_eff / eta = g(min(1, ESS / base)), ESS of unclipped sequence weights; g is sqrt or linear."""
    share = ess(batch.logp - batch.logp_mu, batch.mask, batch.seq_ids, "sequence")
    scale = min(1.0, share / config.vcpo_base_ess)
    return math.sqrt(scale) if config.vcpo_scaling == "sqrt" else scale
