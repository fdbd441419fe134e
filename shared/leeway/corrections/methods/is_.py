"""Importance sampling.

A w s(a),   w = pi_theta/mu of the token, or its product over the response
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from leeway.corrections.clips import TokenWeight, f_identity
from leeway.corrections.registry import Method
from leeway.corrections.settings import Level

if TYPE_CHECKING:
    from leeway.corrections.batch import TokenBatch
    from leeway.corrections.weighted import PerToken


class IsConfig(Level):
    """Importance sampling: the ratio pi_theta/mu is the weight, without any bound."""

    method: Literal["is"] = "is"


def weight(config: IsConfig) -> TokenWeight:
    return TokenWeight("mu", f_identity(), f_identity())


def loss(batch: TokenBatch, config: IsConfig) -> PerToken:
    from leeway.corrections.weighted import weighted

    return weighted(batch, weight(config), config.centre, config.level)


METHOD = Method(
    settings=IsConfig,
    formula="A w s(a), w = pi_theta/mu",
    needs=("logp_mu",),
    source="importance sampling",
    loss=loss,
    weight=weight,
    variants={"": {"score_centering": False}},
)
