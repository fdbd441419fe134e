"""The section `correction`: what all methods share, and how the settings of the chosen one are found.

Each method of `leeway.corrections.methods` (and of installed packages) brings its own settings model, a
subclass of `CorrectionConfig`. The section is the union of these models, discriminated by `method`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from leeway.config.base import Section
from leeway.config.choice import Choice

if TYPE_CHECKING:
    from leeway.corrections.registry import Method
    from leeway.registry import Registry

DEFAULT_METHOD = "dlc"
PPO_CLIP = (0.2, 0.2, 3.0)
"""Clip range of PPO (low, high, dual) that `lag/clip_fraction` is measured with for methods without one."""


class CorrectionConfig(Section):
    """How the trainer corrects for the mismatch between sampler and trainer."""

    method: str
    """The correction; `leeway corrections` lists them, with the keys of each."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """How rewards become advantages: (R - mean) / std of the group, R - mean, or R - mean of the others."""
    std_floor: float = Field(default=1e-4, gt=0)
    """Minimum standard deviation of a group's rewards with `grpo`; below it the group's advantages are 0."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] | None = None
    """How token losses become a scalar, always by the requested counts; null: the method's default."""

    @property
    def centre(self) -> str:
        """What is subtracted at each prefix: discrepancy, weighted, plain or none."""
        return "none"

    @property
    def needs_head(self) -> bool:
        """True when the method reads more of the sampler's distribution than the drawn token."""
        return self.centre != "none"

    @property
    def needs_sync_tail(self) -> bool:
        """True when the centre off the reported head follows the trainer on the sampler's weights."""
        return False

    @property
    def ppo_clip(self) -> tuple[float, float, float]:
        """(low, high, dual) of the clip that `lag/clip_fraction` is measured with."""
        return PPO_CLIP

    def common(self) -> dict[str, Any]:
        """Values of the keys that all methods have, without `method`."""
        return {key: getattr(self, key) for key in METHOD_CHOICE.common_keys}


def _methods() -> Registry[Method[Any]]:
    from leeway.corrections.registry import METHODS

    return METHODS


METHOD_CHOICE = Choice(CorrectionConfig, "method", DEFAULT_METHOD, _methods)
AnyCorrection = Annotated[CorrectionConfig, METHOD_CHOICE]
"""Type of a field that holds the settings of any method."""


def build_correction(value: Any = None) -> CorrectionConfig:
    """The settings of the method that `value` names (default: dlc) from plain data.

    Settings that are already built are returned as they are. Raises ValidationError, also for a method that
    does not exist.
    """
    return METHOD_CHOICE.build(value)
