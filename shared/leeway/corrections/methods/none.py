"""No correction: asynchronous GRPO (arXiv 2402.03300) as it is.

A s(a)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from leeway.corrections.clips import TokenWeight, f_one
from leeway.corrections.registry import Method
from leeway.corrections.settings import ScoreCentering

if TYPE_CHECKING:
    from leeway.corrections.batch import TokenBatch
    from leeway.corrections.weighted import PerToken


class NoneConfig(ScoreCentering):
    """No correction: every token has weight one."""

    method: Literal["none"] = "none"


def weight(config: NoneConfig) -> TokenWeight:
    return TokenWeight("mu", f_one(), f_one())


def loss(batch: TokenBatch, config: NoneConfig) -> PerToken:
    from leeway.corrections.weighted import weighted

    return weighted(batch, weight(config), config.centre)


METHOD = Method(
    settings=NoneConfig,
    formula="A s(a)",
    needs=(),
    source="GRPO (arXiv 2402.03300), asynchronous",
    loss=loss,
    weight=weight,
    variants={"": {"score_centering": False}},
)
