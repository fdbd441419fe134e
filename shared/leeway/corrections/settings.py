"""Keys that several methods share, as bases of their settings models. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from leeway.config.correction import PPO_CLIP, CorrectionConfig


class Head(CorrectionConfig):
    """Settings of a method that can subtract a centre at each prefix."""

    head_tail: Literal["current", "sync"] = "current"
    """How centring models the sampler's distribution off the reported head: proportional to the current
    policy (no extra work), or to the trainer on the sampler's weights (closer under lag; one more product
    with the output layer per token)."""

    @property
    def needs_sync_tail(self) -> bool:
        return self.needs_head and self.head_tail == "sync"


class ScoreCentering(Head):
    """Settings of a method whose weighted score can be centred."""

    score_centering: bool = False
    """Subtract E_mu[w s], the mean of the weighted score under the sampler's distribution."""

    @property
    def centre(self) -> str:
        return "weighted" if self.score_centering else "none"


class Level(ScoreCentering):
    """Settings of importance sampling by token or by response."""

    level: Literal["token", "sequence"] = "token"
    """`token`: the ratio of each token; `sequence`: the product of the ratios over the response."""

    @model_validator(mode="after")
    def _only_tokens_are_centred(self) -> Self:
        if self.score_centering and self.level == "sequence":
            raise ValueError("score_centering works only with weights per token: set level=token")
        return self


class Band(Level):
    """Settings of masked importance sampling."""

    low: float = Field(default=0.5, ge=0)
    """Lower bound of the band."""
    high: float = Field(default=5.0, gt=0)
    """Upper bound of the band."""
    inside: Literal["ratio", "one"] = "ratio"
    """Weight inside the band: the ratio, or one."""
    outside: Literal["drop", "clamp"] = "drop"
    """Weight outside the band: zero, or the nearest bound."""

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        require_below(self, "low", "high")
        return self


class PpoClip(CorrectionConfig):
    """Settings of PPO's clip with an upper bound for negative advantages."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """A ratio below 1 - clip_low is clipped where the advantage is negative."""
    clip_high: float = Field(default=0.2, ge=0)
    """A ratio above 1 + clip_high is clipped where the advantage is positive."""
    dual_clip: float = Field(default=3.0, gt=1)
    """Maximum ratio of a token with a negative advantage."""

    @property
    def ppo_clip(self) -> tuple[float, float, float]:
        return self.clip_low, self.clip_high, self.dual_clip


class Proximal(CorrectionConfig):
    """Settings of decoupled PPO's weight: a proximal policy, and a clip of the ratio to it."""

    prox_logp_method: Literal["recompute", "loglinear"] = "recompute"
    """The proximal policy: the policy at the start of the update, or a log-linear interpolation between it
    and the sampler's by age (A-3PO)."""
    behave_weight_cap: float | None = Field(default=5.0, gt=0)
    """Tokens whose weight prox/mu is larger are dropped; null: no limit."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """A ratio to the proximal policy below 1 - clip_low is clipped where the advantage is negative."""
    clip_high: float = Field(default=0.2, ge=0)
    """A ratio to the proximal policy above 1 + clip_high is clipped where the advantage is positive."""

    @property
    def ppo_clip(self) -> tuple[float, float, float]:
        return self.clip_low, self.clip_high, PPO_CLIP[2]


def require_below(settings: CorrectionConfig, low: str, high: str) -> None:
    """Raises ValueError unless the value of key `low` is below that of `high`."""
    below, above = getattr(settings, low), getattr(settings, high)
    if below >= above:
        raise ValueError(f"{low}={below} must be below {high}={above}")
