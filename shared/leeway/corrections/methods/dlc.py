"""Discrepancy-lag correction.

    A [ f(pi_theta/pi_s) s(a) - (E_mu - E_pi_s)[ f(pi_theta/pi_s) s ] ]

The lag ratio pi_theta/pi_s is clipped, the numerical discrepancy between mu and pi_s is centred.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from leeway.corrections.clips import TokenWeight, f_clamp, f_identity, f_ppo
from leeway.corrections.registry import Method
from leeway.corrections.settings import Head, PpoClip, require_below

if TYPE_CHECKING:
    from leeway.corrections.batch import TokenBatch
    from leeway.corrections.weighted import PerToken


class DlcConfig(Head, PpoClip):
    """Discrepancy-lag correction: clips the lag ratio pi_theta/pi_s and centres the discrepancy."""

    method: Literal["dlc"] = "dlc"
    centering: Literal["discrepancy", "weighted", "plain", "none"] = "discrepancy"
    """What is subtracted at each prefix."""
    lag_clip: Literal["ppo", "clamp", "none"] = "ppo"
    """Form of the clip of the lag ratio: PPO's clip, truncation to [clamp_low, clamp_high], or none."""
    clamp_low: float = Field(default=0.0, ge=0)
    """Lower bound with `lag_clip: clamp`."""
    clamp_high: float = Field(default=2.0, gt=0)
    """Upper bound with `lag_clip: clamp`."""

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        require_below(self, "clamp_low", "clamp_high")
        return self

    @property
    def centre(self) -> str:
        return self.centering


def weight(config: DlcConfig) -> TokenWeight:
    if config.lag_clip == "ppo":
        f = f_ppo(*config.ppo_clip)
    elif config.lag_clip == "clamp":
        f = f_clamp(config.clamp_low, config.clamp_high)
    else:
        f = f_identity()
    return TokenWeight("sync", f, f_identity())


def loss(batch: TokenBatch, config: DlcConfig) -> PerToken:
    from leeway.corrections.weighted import weighted

    return weighted(batch, weight(config), config.centre)


METHOD = Method(
    settings=DlcConfig,
    formula="A [ f(pi_theta/pi_s) s(a) - (E_mu - E_pi_s)[ f(pi_theta/pi_s) s ] ]",
    needs=("logp_mu", "logp_sync", "head"),
    source="discrepancy-lag correction",
    loss=loss,
    weight=weight,
    variants={
        "": {},
        "centering=weighted": {"centering": "weighted"},
        "centering=plain": {"centering": "plain"},
        "centering=none": {"centering": "none"},
        "lag_clip=clamp": {"lag_clip": "clamp"},
        "lag_clip=none": {"lag_clip": "none"},
    },
)
