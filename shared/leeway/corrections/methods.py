"""The corrections by name. Each is one function from a TokenBatch to a per-token loss.

All are composed of the same parts: a ratio to a reference, a clip that makes it a weight, a centre, an
aggregation. The gradient of a loss is minus the estimator in the method's `formula`; its value has no
meaning, because weights and centring coefficients are detached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from leeway.config import CorrectionConfig
from leeway.corrections.batch import TokenBatch
from leeway.corrections.lag import ess
from leeway.corrections.m2 import budget_clip, suffix_cut, trust_region
from leeway.corrections.primitives import (
    Clip,
    aggregate,
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
class Method:
    """A correction.

    `loss(batch, config)` gives the per-token loss [N] and metrics. `plan(batch, config)` looks at the global
    batch before any gradient, for methods whose weights depend on all of it; `lr_scale(batch, config)` at the
    global batch after it, for methods that change the learning rate of the step.
    """

    name: str
    formula: str
    needs: tuple[str, ...]
    """Of: logp_mu, logp_sync, logp_prox, head, pre-pass (an extra forward pass of pi_theta)."""
    defaults: tuple[str, ...]
    """Keys of CorrectionConfig that it reads."""
    source: str
    loss: Callable[[TokenBatch, CorrectionConfig], PerToken]
    aggregation: str = "token-mean"
    """Used when correction.aggregation is null."""
    plan: Callable[[TokenBatch, CorrectionConfig], Mapping[str, float]] | None = field(default=None)
    lr_scale: Callable[[TokenBatch, CorrectionConfig], float] | None = field(default=None)


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x [N] over the tokens of mask."""
    return masked(x, mask).sum() / mask.sum().clamp_min(1)


# -- weights of tokens ------------------------------------------------------------------------------------


def reference(batch: TokenBatch, name: str) -> tuple[Tensor, Tensor | None]:
    """(log pi_ref(a) [N], log pi_ref(head) [N, K] or None) of mu, sync or prox."""
    if name == "mu":
        return batch.logp_mu, batch.head_logp_mu
    if name == "sync":
        return batch.logp_sync, batch.head_logp_sync
    return batch.prox(), None


def weighted(batch: TokenBatch, ref: str, f: Clip, centre: str) -> PerToken:
    """A [ w s(a) - centre ] with w = f(pi_theta / pi_ref; A); `centre` as in `centring`."""
    advantage = batch.advantages.detach()
    logp_ref, head_ref = reference(batch, ref)
    w = f(ratio(batch.logp, logp_ref), advantage)
    direct = w * batch.logp
    metrics: Metrics = {"weight/mean": token_mean(w, batch.mask)}
    if centre == "none":
        return -advantage * direct, metrics
    if head_ref is None:
        raise ValueError(f"centring of a ratio to {ref} needs its head log-probabilities in the batch")
    coefficients, head_mask, more = centring(batch, centre, f, w, head_ref)
    metrics |= {name: token_mean(value, batch.mask) for name, value in more.items()}
    return -advantage * (direct - centre_surrogate(batch, coefficients, head_mask)), metrics


def centring(
    batch: TokenBatch, kind: str, f: Clip, w: Tensor, head_ref: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Coefficients c(v) [N, K] of the centre sum_v c(v) s(v), the head's mask [N, K], and metrics [N].

        discrepancy   E_mu[w s] - E_ref[w s]       weighted   E_mu[w s]       plain   w(a) E_mu[s]

    Off the head all distributions are taken as proportional to pi_theta, so the tail's part of the centre is
    alpha E_{pi_theta}[s; tail] = -alpha E_{pi_theta}[s; head] and only head log-probabilities are needed.
    For `discrepancy` alpha = (rho_mu - rho_ref) f(1/rho_ref): the tail's coefficients add up to at most the
    difference of the two heads' masses, itself at most head_eps plus the discrepancy.
    """
    if not batch.has_head():
        raise ValueError(f"centring ({kind}) needs head_logp_mu, head_logp and head_logp_sync in the batch")
    assert batch.head_logp is not None
    mu, pi, _, mask = head_probabilities(batch)
    ref = masked(torch.exp(head_ref.detach()), mask)
    has_tail, (rho_mu, rho_ref) = tail_ratios(batch, pi, mu, ref)
    advantage = batch.advantages.detach()[:, None]
    w_head = masked(f(ratio(batch.head_logp, head_ref), advantage), mask)
    w_tail = f(1 / rho_ref, advantage)
    if kind == "discrepancy":
        on_head, alpha = (mu - ref) * w_head, (rho_mu - rho_ref) * w_tail
    elif kind == "weighted":
        on_head, alpha = mu * w_head, rho_mu * w_tail
    else:
        on_head, alpha = w[:, None] * mu, w[:, None] * rho_mu
    metrics = {
        "center/abs_coef_sum": on_head.abs().sum(1),
        "center/head_mass_mu": mu.sum(1),
        "center/rho_mu": rho_mu[:, 0],
    }
    return on_head - has_tail * alpha * pi, mask, metrics


def centre_of(config: CorrectionConfig) -> str:
    """The centre that correction.score_centering adds to a method."""
    return "weighted" if config.score_centering else "none"


def lag_clip(config: CorrectionConfig) -> Clip:
    """The clip of the lag ratio that the configuration names."""
    if config.lag_clip == "ppo":
        return f_ppo(config.clip_low, config.clip_high, config.dual_clip)
    if config.lag_clip == "clamp":
        return f_clamp(config.clamp_low, config.clamp_high)
    return f_identity()


def dlc(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """Discrepancy-lag correction: clip the lag, centre the discrepancy at each prefix.

    ghat = A [ wbar(a) s(a) - (E_mu - E_{pi_s})[wbar s] ],   wbar = f(pi_theta / pi_s; sign A)
    """
    return weighted(batch, "sync", lag_clip(config), config.centering)


def none(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """No correction (asynchronous GRPO as is): ghat = A s(a)."""
    return weighted(batch, "mu", f_one(), centre_of(config))


def score_centering(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """ghat = A [ s(a) - E_mu[s] ] (arXiv 2609.20807, eq. 9 and 12)."""
    return weighted(batch, "mu", f_one(), "weighted")


def by_level(batch: TokenBatch, config: CorrectionConfig, f: Clip) -> PerToken:
    """A w s(a), w = f(pi_theta/mu) of the token, or f of the product of the ratios of its response."""
    if config.is_level == "token":
        return weighted(batch, "mu", f, centre_of(config))
    return sequence_weighted(batch, f)


def sequence_weighted(batch: TokenBatch, f: Clip) -> PerToken:
    """A W s(a), W = f(prod_t pi_theta/mu), the same for all tokens of a response."""
    advantage = batch.advantages.detach()
    log_w = per_response((batch.logp - batch.logp_mu).detach(), batch)
    w = f(ratio(log_w, torch.zeros_like(log_w)), advantage)
    return -advantage * w * batch.logp, {"weight/mean": token_mean(w, batch.mask)}


def importance_sampling(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """ghat = A w s(a), w = pi_theta(a)/mu(a), or its product over the response."""
    return by_level(batch, config, f_identity())


def tis(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """Truncated importance sampling: w = clamp(pi_theta/mu, tis_clip_low, tis_clip)."""
    return by_level(batch, config, f_clamp(config.tis_clip_low, config.tis_clip))


def mis(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """Masked importance sampling (IcePop): the ratio or one inside a band, nothing or its bound outside."""
    f = f_band(config.mis_low, config.mis_high, config.mis_inside, config.mis_outside)
    return by_level(batch, config, f)


# -- clipped surrogates -----------------------------------------------------------------------------------


def ppo(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """PPO's clipped surrogate (arXiv 1707.06347, dual clip 1912.09729) with a reference by name."""
    f = f_ppo(config.clip_low, config.clip_high, config.dual_clip)
    return weighted(batch, config.reference, f, centre_of(config))


def loglinear_prox(batch: TokenBatch) -> Tensor:
    """[N] A-3PO's proximal policy (arXiv 2512.06547): log mu + alpha log(pi_theta/mu), alpha = (d-1)/d.

    d is the token's age in optimiser steps; alpha is 0 where d <= 0.
    """
    age = torch.zeros_like(batch.logp) if batch.age is None else batch.age.to(batch.logp.dtype)
    alpha = torch.where(age > 0, (age - 1) / age.clamp_min(1), torch.zeros_like(age))
    return batch.logp_mu + alpha * (batch.logp.detach() - batch.logp_mu)


def decoupled_ppo(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """AReaL's decoupled PPO (arXiv 2110.00641, 2505.24298): w min(r A, clip(r) A).

    w = pi_prox/mu, r = pi_theta/pi_prox. Tokens with w above behave_weight_cap are dropped; denominators keep
    counting them.
    """
    prox = batch.prox() if config.prox_logp_method == "recompute" else loglinear_prox(batch)
    w = ratio(prox, batch.logp_mu)
    if config.behave_weight_cap is not None:
        w = torch.where(w <= config.behave_weight_cap, w, torch.zeros_like(w))
    advantage = batch.advantages.detach()
    gate = f_ppo(config.clip_low, config.clip_high, math.inf)(ratio(batch.logp, prox), advantage)
    metrics = {
        "weight/mean": token_mean(w * gate, batch.mask),
        "weight/behave_mean": token_mean(w, batch.mask),
    }
    return -advantage * w * gate * batch.logp, metrics


def gspo(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """GSPO (arXiv 2507.18071): min(s A, clip(s) A), s = exp(mean_t log pi_theta/pi_ref)."""
    logp_ref, _ = reference(batch, config.reference)
    log_s = per_response((batch.logp - logp_ref).detach(), batch, mean=True)
    advantage = batch.advantages.detach()
    f = f_ppo(config.gspo_clip_low, config.gspo_clip_high, math.inf)
    w = f(ratio(log_s, torch.zeros_like(log_s)), advantage)
    clipped = token_mean((w == 0).to(w.dtype), batch.mask)
    return -advantage * w * batch.logp, {"weight/mean": token_mean(w, batch.mask), "gspo/clipped": clipped}


# -- methods that look at the whole batch -----------------------------------------------------------------


def plan_m2po(batch: TokenBatch, config: CorrectionConfig) -> dict[str, float]:
    """M2PO on the global batch: `cut` on M2, `clip` on |log-ratio| (repo), `kept` share of tokens (areal)."""
    other = batch.prox() if config.m2_variant == "areal" else batch.logp.detach()
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
    log_ratio = (batch.logp - batch.logp_mu).detach()
    if config.m2_variant == "repo":
        low, high = math.exp(-plan["clip"]), math.exp(min(plan["clip"], 20.0))
        f = f_ppo(max(1 - low, REPO_M2_FLOOR[0]), max(high - 1, REPO_M2_FLOOR[1]), config.dual_clip)
        return weighted(batch, "mu", f, "none")
    if config.m2_variant == "areal":
        keep = (batch.prox() - batch.logp_mu) ** 2 <= plan["cut"]
        loss, metrics = decoupled_ppo(batch, config)
        loss = masked(loss, keep) / max(plan["kept"], 1e-9)
    else:
        keep = ~trust_region(log_ratio, advantage) | (log_ratio**2 <= plan["cut"])
        loss, metrics = weighted(batch, "mu", f_identity(), "none")
        loss = masked(loss, keep)
    return loss, {**metrics, "m2po/masked": 1 - token_mean(keep.to(loss.dtype), batch.mask)}


def vcpo(batch: TokenBatch, config: CorrectionConfig) -> PerToken:
    """VCPO (arXiv 2602.17616): sequence TIS; the step's learning rate follows the effective sample size."""
    return sequence_weighted(batch, f_clamp(0.0, config.vcpo_clip))


def vcpo_lr_scale(batch: TokenBatch, config: CorrectionConfig) -> float:
    """eta_eff / eta = g(min(1, ESS / base)), ESS of unclipped sequence weights; g is sqrt or linear."""
    share = ess(batch.logp - batch.logp_mu, batch.mask, batch.seq_ids, "sequence")
    scale = min(1.0, share / config.vcpo_base_ess)
    return math.sqrt(scale) if config.vcpo_scaling == "sqrt" else scale


_CLIP = ("clip_low", "clip_high", "dual_clip")
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "dlc",
            "A [ f(pi_theta/pi_s) s(a) - (E_mu - E_pi_s)[ f(pi_theta/pi_s) s ] ]",
            ("logp_mu", "logp_sync", "head"),
            ("centering", "lag_clip", *_CLIP, "clamp_low", "clamp_high"),
            "discrepancy-lag correction",
            dlc,
        ),
        Method("none", "A s(a)", (), ("score_centering",), "GRPO (arXiv 2402.03300), asynchronous", none),
        Method(
            "is",
            "A w s(a), w = pi_theta/mu",
            ("logp_mu",),
            ("is_level", "score_centering"),
            "importance sampling",
            importance_sampling,
        ),
        Method(
            "tis",
            "A min(w, C) s(a)",
            ("logp_mu",),
            ("tis_clip", "tis_clip_low", "is_level", "score_centering"),
            "Yao, Liu et al. 2025; OpenReview 8MHqvb4lK9",
            tis,
        ),
        *(
            Method(
                name,
                "A w 1[low <= w <= high] s(a)",
                ("logp_mu",),
                ("mis_low", "mis_high", "mis_inside", "mis_outside", "is_level", "score_centering"),
                source,
                mis,
            )
            for name, source in (
                ("mis", "Liu, Li et al. 2025"),
                ("icepop", "Ring-1T report (arXiv 2510.18855)"),
            )
        ),
        Method(
            "score_centering",
            "A [ s(a) - E_mu[s] ]",
            ("logp_mu", "head"),
            (),
            "arXiv 2609.20807",
            score_centering,
        ),
        Method(
            "ppo",
            "grad min(r A, clip(r) A), r = pi_theta/pi_ref",
            ("logp_mu", "logp_sync"),
            ("reference", *_CLIP, "score_centering"),
            "arXiv 1707.06347",
            ppo,
        ),
        Method(
            "decoupled_ppo",
            "w grad min(r A, clip(r) A), w = pi_prox/mu, r = pi_theta/pi_prox",
            ("logp_mu", "logp_prox"),
            ("prox_logp_method", "behave_weight_cap", "clip_low", "clip_high"),
            "arXiv 2505.24298; A-3PO 2512.06547",
            decoupled_ppo,
        ),
        Method(
            "gspo",
            "grad min(s A, clip(s) A), s = exp mean_t log(pi_theta/pi_ref)",
            ("logp_mu", "logp_sync"),
            ("reference", "gspo_clip_low", "gspo_clip_high"),
            "arXiv 2507.18071",
            gspo,
            aggregation="seq-mean-token-mean",
        ),
        Method(
            "m2po",
            "A M r s(a), mean of (log r)^2 over kept tokens <= tau",
            ("logp_mu", "pre-pass"),
            ("m2_variant", "m2_threshold"),
            "arXiv 2510.01161",
            m2po,
            plan=plan_m2po,
        ),
        Method(
            "vcpo",
            "A min(W, C) s(a), W = prod_t pi_theta/mu; learning rate x sqrt(ESS)",
            ("logp_mu",),
            ("vcpo_clip", "vcpo_scaling", "vcpo_base_ess"),
            "arXiv 2602.17616",
            vcpo,
            aggregation="seq-mean-token-mean",
            lr_scale=vcpo_lr_scale,
        ),
    )
}


def surrogate_loss(method: str, batch: TokenBatch, config: CorrectionConfig) -> tuple[Tensor, Metrics]:
    """The loss to minimise (scalar) and metrics (token means) of a method on a batch.

    Partial batches add up: the losses of all micro-batches and ranks sum to the loss of the global batch
    (with `batch.plan` from the global batch for methods that plan). Raises ValueError for an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"correction.method {method!r}: expected one of {', '.join(METHODS)}")
    chosen = METHODS[method]
    per_token, metrics = chosen.loss(batch.without_untrained(), config)
    return aggregate(per_token, batch, config.aggregation or chosen.aggregation), metrics


def plan_batch(method: str, batch: TokenBatch, config: CorrectionConfig) -> Mapping[str, float] | None:
    """What a method wants to know of the global batch before its gradients; None for most."""
    plan = METHODS[method].plan
    return None if plan is None else plan(replace(batch, plan=None), config)


def lr_scale(method: str, batch: TokenBatch, config: CorrectionConfig) -> float:
    """Factor on the learning rate of the step, from the global batch; 1 for most methods."""
    scale = METHODS[method].lr_scale
    return 1.0 if scale is None else scale(batch, config)
