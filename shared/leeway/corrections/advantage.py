"""Advantages from the rewards of groups. Every requested response counts, whatever its reward."""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = ("grpo", "dr_grpo", "rloo")


def advantages(rewards: Tensor, kind: str = "grpo", std_floor: float = 1e-4) -> Tensor:
    """Advantages [groups, group_size] from rewards of the same shape (float64 inside; the input's type out,
    float32 for whole numbers).

    grpo (arXiv 2402.03300): (R - mean) / (std + 1e-6), sample std; a group whose std is below `std_floor`
    gets 0 (its spread is float residue, which the division would blow up).
    dr_grpo (arXiv 2503.20783): R - mean.
    rloo (arXiv 2402.14740): R - mean of the others. A group of one gets 0 (rloo: ValueError).
    Raises ValueError for a reward that is not finite or an unknown kind.
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be [groups, group_size], got shape {tuple(rewards.shape)}")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("a reward is not finite")
    values = rewards.double()
    size = values.shape[1]
    centred = values - values.mean(1, keepdim=True)
    if kind == "grpo":
        std = values.std(1, keepdim=True) if size > 1 else torch.zeros_like(centred)
        result = torch.where(std < std_floor, torch.zeros_like(centred), centred / (std + 1e-6))
    elif kind == "dr_grpo":
        result = centred
    elif kind == "rloo":
        if size < 2:
            raise ValueError("rloo needs at least two responses per prompt")
        result = centred * size / (size - 1)
    else:
        raise ValueError(f"advantage {kind!r}: expected one of {', '.join(NAMES)}")
    return result.to(rewards.dtype if rewards.is_floating_point() else torch.float32)
