"""PPO (arXiv 1707.06347) with dual clip (arXiv 1912.09729).

grad min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),   r = pi_theta/pi_ref
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from leeway.corrections.clips import TokenWeight, f_identity, f_ppo
from leeway.corrections.registry import Method
from leeway.corrections.settings import PpoClip, ScoreCentering

if TYPE_CHECKING:
    from leeway.corrections.batch import TokenBatch
    from leeway.corrections.weighted import PerToken


class PpoConfig(ScoreCentering, PpoClip):
    """PPO: the clipped surrogate of the ratio to a reference policy."""

    method: Literal["ppo"] = "ppo"
    reference: Literal["mu", "prox", "sync"] = "mu"
    """Denominator of the ratio: the sampler's distribution, the policy at the start of the update (with one
    optimiser step per batch: the current one), or the trainer on the sampler's weights."""

    @model_validator(mode="after")
    def _can_be_centred(self) -> Self:
        if self.score_centering and self.reference == "prox":
            raise ValueError("score_centering works only with reference mu or sync")
        return self


def weight(config: PpoConfig) -> TokenWeight:
    return TokenWeight(config.reference, f_ppo(*config.ppo_clip), f_identity())


def loss(batch: TokenBatch, config: PpoConfig) -> PerToken:
    from leeway.corrections.weighted import weighted

    return weighted(batch, weight(config), config.centre)


METHOD = Method(
    settings=PpoConfig,
    formula="grad min(r A, clip(r) A), r = pi_theta/pi_ref",
    needs=("logp_mu", "logp_sync"),
    source="arXiv 1707.06347",
    loss=loss,
    weight=weight,
    variants={
        **{f"reference={r}": {"reference": r, "score_centering": False} for r in ("mu", "sync", "prox")},
        "+ score_centering": {"reference": "mu", "score_centering": True},
    },
)
