"""Truncated importance sampling (Yao, Liu et al. 2025; OpenReview 8MHqvb4lK9).

A clamp(w, clip_low, clip) s(a),   w = pi_theta/mu of the token, or its product over the response
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from leeway.corrections.clips import TokenWeight, f_clamp, f_identity
from leeway.corrections.registry import Method
from leeway.corrections.settings import Level, require_below

if TYPE_CHECKING:
    from leeway.corrections.batch import TokenBatch
    from leeway.corrections.weighted import PerToken


class TisConfig(Level):
    """Truncated importance sampling: the ratio pi_theta/mu, clamped to [clip_low, clip]."""

    method: Literal["tis"] = "tis"
    clip: float = Field(default=2.0, gt=0)
    """Maximum weight (C)."""
    clip_low: float = Field(default=0.0, ge=0)
    """Minimum weight."""

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        require_below(self, "clip_low", "clip")
        return self


def weight(config: TisConfig) -> TokenWeight:
    return TokenWeight("mu", f_clamp(config.clip_low, config.clip), f_identity())


def loss(batch: TokenBatch, config: TisConfig) -> PerToken:
    from leeway.corrections.weighted import weighted

    return weighted(batch, weight(config), config.centre, config.level)


METHOD = Method(
    settings=TisConfig,
    formula="A min(w, C) s(a), w = pi_theta/mu",
    needs=("logp_mu",),
    source="Yao, Liu et al. 2025; OpenReview 8MHqvb4lK9",
    loss=loss,
    weight=weight,
    variants={
        "": {"score_centering": False},
        "+ score_centering": {"score_centering": True, "level": "token"},
    },
)
