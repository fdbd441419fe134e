"""Clips: functions from a ratio and an advantage to the weight of a token. They import no torch.

r = pi_theta / pi_ref, A the advantage; both tensors of broadcastable shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Clip = Callable[["Tensor", "Tensor"], "Tensor"]
"""f(r, A): the weight for ratio r at advantage A."""


@dataclass(frozen=True)
class TokenWeight:
    """A weight w = f(pi_theta / pi_ref; A) of a token; `free` is the weight without any clipping."""

    ref: Literal["mu", "sync", "prox"]
    f: Clip
    free: Clip


def f_ppo(low: float, high: float, dual: float) -> Clip:
    """PPO's clip as a weight: A >= 0: r 1[r <= 1+high]; A < 0: r 1[1-low <= r <= dual]."""

    def clip(r: Tensor, advantage: Tensor) -> Tensor:
        positive = advantage >= 0
        inside = (positive & (r <= 1 + high)) | (~positive & (r >= 1 - low) & (r <= dual))
        return r.where(inside, r.new_zeros(()))

    return clip


def f_clamp(low: float, high: float) -> Clip:
    """Truncated importance sampling as a weight: clamp(r, low, high)."""
    return lambda r, advantage: r.clamp(low, high)


def f_band(low: float, high: float, inside: str, outside: str) -> Clip:
    """Masked importance sampling: inside [low, high] the ratio or one, outside nothing or the bound."""

    def clip(r: Tensor, advantage: Tensor) -> Tensor:
        kept = r if inside == "ratio" else r.new_ones(r.shape)
        rest = r.new_zeros(r.shape) if outside == "drop" else r.clamp(low, high)
        return kept.where((r >= low) & (r <= high), rest)

    return clip


def f_one() -> Clip:
    """No weight: one for every token."""
    return lambda r, advantage: r.new_ones(r.shape)


def f_identity() -> Clip:
    """No clip: the weight is the ratio."""
    return lambda r, advantage: r
