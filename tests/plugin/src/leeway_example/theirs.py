"""Importance sampling with a smooth upper bound: A r / (1 + r/cap) s(a), r = pi_theta/mu."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from leeway.config import CorrectionConfig
from leeway.corrections.registry import Method

if TYPE_CHECKING:
    from leeway.corrections.batch import TokenBatch
    from leeway.corrections.weighted import PerToken


class TheirsConfig(CorrectionConfig):
    """Importance sampling whose weights approach a bound instead of being clipped at it."""

    method: Literal["theirs"] = "theirs"
    cap: float = Field(default=4.0, gt=0)
    """Bound that the weights approach."""


def loss(batch: TokenBatch, config: TheirsConfig) -> PerToken:
    """(loss [N], metrics); its gradient is minus the estimator above. Torch is imported here, not above."""
    from leeway.corrections.primitives import ratio
    from leeway.corrections.weighted import token_mean

    r = ratio(batch.logp, batch.logp_mu)  # [N], without gradient
    weight = r / (1 + r / config.cap)
    return -batch.advantages * weight * batch.logp, {"weight/mean": token_mean(weight, batch.mask)}


METHOD = Method(
    settings=TheirsConfig,
    formula="A r/(1 + r/cap) s(a), r = pi_theta/mu",
    needs=("logp_mu",),
    source="an example",
    loss=loss,
)
