"""M2PO (arXiv 2510.01161): a mask that bounds the second moment of the log-ratio.

    A M r s(a),   r = pi_theta/mu,   mean of (log r)^2 over kept tokens <= threshold

The variants differ in the tokens that they look at and in what they do with them:
paper: masks tokens of the trust region, those that an update would push further away.
areal: masks any token by pi_prox/mu, keeps decoupled PPO's loss and divides by the tokens that are left.
repo: the authors' code; PPO's clip with bounds from the budget, never tighter than [1 - 0.3, 1 + 0.5].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from leeway.corrections.clips import TokenWeight, f_identity, f_ppo
from leeway.corrections.registry import Method
from leeway.corrections.settings import Proximal
from leeway.metrics.areas.correction import M2PO_MASKED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from leeway.corrections.batch import TokenBatch
    from leeway.corrections.weighted import PerToken

REPO_FLOOR = (0.3, 0.5)


class M2poConfig(Proximal):
    """M2PO: the ratio pi_theta/mu, masked so that the second moment of its logarithm stays bounded."""

    method: Literal["m2po"] = "m2po"
    variant: Literal["paper", "areal", "repo"] = "paper"
    """`paper`: the algorithm as published; `areal`: AReaL's, on the proximal policy; `repo`: the authors'."""
    threshold: float = Field(default=0.04, gt=0)
    """Maximum second moment of the log-ratio over the tokens that are kept."""
    dual_clip: float = Field(default=3.0, gt=1)
    """Maximum ratio of a token with a negative advantage, with `variant: repo`."""

    @property
    def ppo_clip(self) -> tuple[float, float, float]:
        return self.clip_low, self.clip_high, self.dual_clip


def prepare(batch: TokenBatch, config: M2poConfig) -> Mapping[str, float]:
    """On the global batch: `cut` on M2, `clip` on |log-ratio| (repo), `kept` share of tokens (areal)."""
    from leeway.corrections.decoupled import proximal
    from leeway.corrections.m2 import budget_clip, suffix_cut, trust_region

    other = proximal(batch, config) if config.variant == "areal" else batch.logp
    log_ratio = (other - batch.logp_mu)[batch.mask].detach()
    m2 = log_ratio**2
    if config.variant == "areal":
        cut = suffix_cut(m2, config.threshold, strict=True)
        return {"cut": cut, "kept": float((m2 <= cut).sum()) / max(m2.numel(), 1)}
    m2 = m2[trust_region(log_ratio, batch.advantages[batch.mask])]
    if config.variant == "repo":
        return {"clip": budget_clip(m2, config.threshold)}
    return {"cut": suffix_cut(m2, config.threshold)}


def loss(batch: TokenBatch, config: M2poConfig) -> PerToken:
    from leeway.corrections.decoupled import decoupled_weight, proximal
    from leeway.corrections.m2 import trust_region
    from leeway.corrections.primitives import masked, ratio
    from leeway.corrections.weighted import token_mean, weight_metrics, weighted

    found = prepare(batch, config) if batch.prepared is None else batch.prepared
    if config.variant == "repo":
        return weighted(batch, repo_weight(found["clip"], config))
    advantage = batch.advantages.detach()
    if config.variant == "areal":
        keep = (proximal(batch, config) - batch.logp_mu) ** 2 <= found["cut"]
        w, free = decoupled_weight(batch, config)
        share = max(found["kept"], 1e-9)
    else:
        log_ratio = (batch.logp - batch.logp_mu).detach()
        keep = ~trust_region(log_ratio, advantage) | (log_ratio**2 <= found["cut"])
        w = free = ratio(batch.logp, batch.logp_mu)
        share = 1.0
    w = masked(w, keep)
    metrics = weight_metrics(w, free, batch.mask)
    metrics[M2PO_MASKED] = 1 - token_mean(keep.to(w.dtype), batch.mask)
    return -advantage * w * batch.logp / share, metrics


def repo_weight(clip: float, config: M2poConfig) -> TokenWeight:
    """PPO's clip at |log-ratio| = clip, but not tighter than REPO_FLOOR."""
    low, high = math.exp(-clip), math.exp(min(clip, 20.0))
    f = f_ppo(max(1 - low, REPO_FLOOR[0]), max(high - 1, REPO_FLOOR[1]), config.dual_clip)
    return TokenWeight("mu", f, f_identity())


METHOD = Method(
    settings=M2poConfig,
    formula="A M r s(a), r = pi_theta/mu, mean of (log r)^2 over kept tokens <= threshold",
    needs=("logp_mu", "pre-pass"),
    source="arXiv 2510.01161",
    loss=loss,
    prepare=prepare,
    variants={name: {"variant": name} for name in ("paper", "areal", "repo")},
)
