"""The section `correction`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from leeway.config.base import Section


class CorrectionConfig(Section):
    """How the trainer corrects for the mismatch between sampler and trainer."""

    method: str = "dlc"
    """`leeway corrections` lists what there is."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    std_floor: float = Field(default=1e-4, gt=0)
    """Least standard deviation of a group's rewards by which grpo divides; a smaller one gives 0."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] | None = None
    """How token losses become one number, by what was requested; null: the method's own way."""
    centering: Literal["discrepancy", "weighted", "plain", "none"] = "discrepancy"
    """What `dlc` subtracts at each prefix."""
    lag_clip: Literal["ppo", "clamp", "none"] = "ppo"
    """Form of the clip of the lag ratio in `dlc`."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Lower half of PPO's clip range, also of `dlc` and `decoupled_ppo`."""
    clip_high: float = Field(default=0.2, ge=0)
    dual_clip: float = Field(default=3.0, gt=1)
    """Largest ratio of a token with a negative advantage."""
    clamp_low: float = Field(default=0.0, ge=0)
    clamp_high: float = Field(default=2.0, gt=0)
    head_tail: Literal["current", "sync"] = "current"
    """How centring models the sampler's distribution off the reported head: in proportion to the current
    policy (no extra work), or to the trainer on the sampler's weights (closer under lag; one more product
    with the output layer per token)."""
    score_centering: bool = False
    """Subtract the mean of the weighted score under mu: for `none`, `ppo`, `is`, `tis` and `mis` by token."""
    reference: Literal["mu", "prox", "sync"] = "mu"
    """What `ppo` and `gspo` take the ratio to: the sampler's distribution, the policy at the start of the
    update (with one optimiser step a batch: the current one), or the trainer on the sampler's
    weights."""
    is_level: Literal["token", "sequence"] = "token"
    """Level of the importance weights of `is`, `tis` and `mis`."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Largest weight of `tis`."""
    tis_clip_low: float = Field(default=0.0, ge=0)
    mis_low: float = Field(default=0.5, ge=0)
    mis_high: float = Field(default=5.0, gt=0)
    mis_inside: Literal["ratio", "one"] = "ratio"
    """Weight of `mis` and `icepop` inside [mis_low, mis_high]."""
    mis_outside: Literal["drop", "clamp"] = "drop"
    """What they do outside it."""
    gspo_clip_low: float = Field(default=3e-4, gt=0)
    gspo_clip_high: float = Field(default=4e-4, gt=0)
    prox_logp_method: Literal["recompute", "loglinear"] = "recompute"
    """How `decoupled_ppo` gets its proximal policy; loglinear is A-3PO."""
    behave_weight_cap: float | None = Field(default=5.0, gt=0)
    """`decoupled_ppo` drops tokens whose weight prox/mu is larger; null: none."""
    m2_variant: Literal["paper", "areal", "repo"] = "paper"
    m2_threshold: float = Field(default=0.04, gt=0)
    """Largest second moment of the log-ratio that `m2po` lets through."""
    vcpo_clip: float = Field(default=8.0, gt=0)
    """Largest sequence weight of `vcpo`."""
    vcpo_scaling: Literal["sqrt", "linear"] = "sqrt"
    """How `vcpo` scales the learning rate by the effective sample size."""
    vcpo_base_ess: float = Field(default=1.0, gt=0, le=1)
    """Effective sample size (share of n) from which on the learning rate is not scaled."""
    vcpo_baseline: Literal["none", "opob"] = "none"
    """Only none: the optimal baseline needs a gradient norm per response, which batched training has not."""

    @model_validator(mode="after")
    def _ranges(self) -> CorrectionConfig:
        pairs = (("clamp_low", "clamp_high"), ("tis_clip_low", "tis_clip"), ("mis_low", "mis_high"))
        for low, high in pairs:
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)} must be below {high}={getattr(self, high)}")
        if self.vcpo_baseline != "none":
            raise ValueError(
                "vcpo_baseline=opob needs the norm of every response's own gradient; a batched backward pass "
                "gives only their sum, and cheap substitutes are another method: set vcpo_baseline=none"
            )
        if self.score_centering:
            self._can_be_centred()
        return self

    def _can_be_centred(self) -> None:
        if self.method in ("dlc", "score_centering"):
            raise ValueError(f"score_centering is part of method {self.method} already: leave it false")
        if self.method not in ("none", "is", "tis", "mis", "icepop", "ppo"):
            raise ValueError(f"score_centering does not compose with method {self.method}")
        if self.method in ("is", "tis", "mis", "icepop") and self.is_level == "sequence":
            raise ValueError("score_centering composes with weights of tokens only: set is_level=token")
        if self.method == "ppo" and self.reference == "prox":
            raise ValueError("score_centering composes with reference mu or sync")

    @property
    def needs_head(self) -> bool:
        """True when the method looks at more of mu than the drawn token."""
        centred_dlc = self.method == "dlc" and self.centering != "none"
        return centred_dlc or self.method == "score_centering" or self.score_centering
