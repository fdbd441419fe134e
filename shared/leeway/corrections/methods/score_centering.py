"""Score centring (arXiv 2609.20807, equations 9 and 12).

A [ s(a) - E_mu[s] ]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from leeway.corrections.clips import TokenWeight, f_one
from leeway.corrections.registry import Method
from leeway.corrections.settings import Head

if TYPE_CHECKING:
    from leeway.corrections.batch import TokenBatch
    from leeway.corrections.weighted import PerToken


class ScoreCenteringConfig(Head):
    """Score centring: every token has weight one, and the mean score under mu is subtracted."""

    method: Literal["score_centering"] = "score_centering"

    @property
    def centre(self) -> str:
        return "weighted"


def weight(config: ScoreCenteringConfig) -> TokenWeight:
    return TokenWeight("mu", f_one(), f_one())


def loss(batch: TokenBatch, config: ScoreCenteringConfig) -> PerToken:
    from leeway.corrections.weighted import weighted

    return weighted(batch, weight(config), config.centre)


METHOD = Method(
    settings=ScoreCenteringConfig,
    formula="A [ s(a) - E_mu[s] ]",
    needs=("logp_mu", "head"),
    source="arXiv 2609.20807",
    loss=loss,
    weight=weight,
)
