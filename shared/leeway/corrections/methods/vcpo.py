"""VCPO (arXiv 2602.17616): truncated importance sampling by response, and a learning rate that follows ESS.

A min(W, clip) s(a),   W = prod_t pi_theta/mu;   learning rate x g(min(1, ESS / base_ess))
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from leeway.config.correction import CorrectionConfig
from leeway.corrections.clips import TokenWeight, f_clamp, f_identity
from leeway.corrections.registry import Method

if TYPE_CHECKING:
    from leeway.corrections.batch import TokenBatch
    from leeway.corrections.weighted import PerToken


class VcpoConfig(CorrectionConfig):
    """VCPO: truncated weights of whole responses; the learning rate follows their effective sample size."""

    method: Literal["vcpo"] = "vcpo"
    clip: float = Field(default=8.0, gt=0)
    """Maximum weight of a response."""
    scaling: Literal["sqrt", "linear"] = "sqrt"
    """How the learning rate follows the effective sample size (g)."""
    base_ess: float = Field(default=1.0, gt=0, le=1)
    """Effective sample size (share of n) at and above which the learning rate is not scaled."""
    baseline: Literal["none", "opob"] = "none"
    """Only `none`: the optimal baseline needs the gradient norm of each response, which a batched backward
    pass does not give."""

    @model_validator(mode="after")
    def _no_optimal_baseline(self) -> Self:
        if self.baseline != "none":
            raise ValueError(
                "baseline=opob needs the norm of every response's own gradient, and a batched backward pass "
                "gives only their sum: set baseline=none"
            )
        return self


def loss(batch: TokenBatch, config: VcpoConfig) -> PerToken:
    from leeway.corrections.weighted import sequence_weighted

    return sequence_weighted(batch, TokenWeight("mu", f_clamp(0.0, config.clip), f_identity()))


def lr_scale(batch: TokenBatch, config: VcpoConfig) -> float:
    """eta_eff / eta = g(min(1, ESS / base_ess)), ESS of unclipped response weights; g is sqrt or linear."""
    from leeway.corrections.lag import ess

    share = ess(batch.logp - batch.logp_mu, batch.mask, batch.seq_ids, "sequence")
    scale = min(1.0, share / config.base_ess)
    return math.sqrt(scale) if config.scaling == "sqrt" else scale


METHOD = Method(
    settings=VcpoConfig,
    formula="A min(W, C) s(a), W = prod_t pi_theta/mu; learning rate x sqrt(ESS)",
    needs=("logp_mu",),
    source="arXiv 2602.17616",
    loss=loss,
    aggregation="seq-mean-token-mean",
    lr_scale=lr_scale,
)
