"""GSPO (arXiv 2507.18071): PPO's clip of the geometric mean ratio of a response.

grad min(s A, clip(s, 1 - clip_low, 1 + clip_high) A),   s = exp(mean_t log pi_theta/pi_ref)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from leeway.config.correction import CorrectionConfig
from leeway.corrections.clips import f_ppo
from leeway.corrections.registry import Method

if TYPE_CHECKING:
    from leeway.corrections.batch import TokenBatch
    from leeway.corrections.weighted import PerToken


class GspoConfig(CorrectionConfig):
    """GSPO: the clipped surrogate of the geometric mean ratio of a response."""

    method: Literal["gspo"] = "gspo"
    reference: Literal["mu", "prox", "sync"] = "mu"
    """Denominator of the ratio: the sampler's distribution, the policy at the start of the update (with one
    optimiser step per batch: the current one), or the trainer on the sampler's weights."""
    clip_low: float = Field(default=3e-4, gt=0)
    """A mean ratio below 1 - clip_low is clipped where the advantage is negative."""
    clip_high: float = Field(default=4e-4, gt=0)
    """A mean ratio above 1 + clip_high is clipped where the advantage is positive."""


def loss(batch: TokenBatch, config: GspoConfig) -> PerToken:
    from leeway.corrections.primitives import per_response, ratio
    from leeway.corrections.weighted import reference, weight_metrics

    logp_ref, _ = reference(batch, config.reference)
    log_s = per_response((batch.logp - logp_ref).detach(), batch, mean=True)
    advantage = batch.advantages.detach()
    r = ratio(log_s, log_s.new_zeros(log_s.shape))
    w = f_ppo(config.clip_low, config.clip_high, math.inf)(r, advantage)
    return -advantage * w * batch.logp, weight_metrics(w, r, batch.mask)


METHOD = Method(
    settings=GspoConfig,
    formula="grad min(s A, clip(s) A), s = exp mean_t log(pi_theta/pi_ref)",
    needs=("logp_mu", "logp_sync"),
    source="arXiv 2507.18071",
    loss=loss,
    aggregation="seq-mean-token-mean",
)
