"""Masked importance sampling (Liu, Li et al. 2025).

A w 1[low <= w <= high] s(a),   w = pi_theta/mu of the token, or its product over the response
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from leeway.corrections.clips import TokenWeight, f_band, f_identity, f_one
from leeway.corrections.registry import Method
from leeway.corrections.settings import Band

if TYPE_CHECKING:
    from leeway.corrections.batch import TokenBatch
    from leeway.corrections.weighted import PerToken


class MisConfig(Band):
    """Masked importance sampling: the ratio pi_theta/mu inside [low, high], zero outside."""

    method: Literal["mis"] = "mis"


def weight(config: Band) -> TokenWeight:
    f = f_band(config.low, config.high, config.inside, config.outside)
    return TokenWeight("mu", f, f_identity() if config.inside == "ratio" else f_one())


def loss(batch: TokenBatch, config: Band) -> PerToken:
    from leeway.corrections.weighted import weighted

    return weighted(batch, weight(config), config.centre, config.level)


METHOD = Method(
    settings=MisConfig,
    formula="A w 1[low <= w <= high] s(a), w = pi_theta/mu",
    needs=("logp_mu",),
    source="Liu, Li et al. 2025",
    loss=loss,
    weight=weight,
    variants={
        "": {"score_centering": False},
        "+ score_centering": {"score_centering": True, "level": "token"},
    },
)
