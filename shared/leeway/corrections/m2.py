"""M2PO's trust region: which tokens' log-ratios are too large, found on the global batch.

Paper: arXiv 2510.01161, algorithm 1. The three variants differ in what they look at and in what they do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def suffix_cut(m2: Tensor, threshold: float, *, strict: bool = False) -> float:
    """Largest M2 that stays when the largest are dropped until the mean is at most `threshold`.

    m2: [n] squared log-ratios; `strict`: until it is below. Returns -1 when none stays. O(n log n); the same
    as dropping one by one, but equal values (the same token of equal responses) stay or go together.
    """
    ordered = torch.sort(m2.double()).values
    if ordered.numel() == 0:
        return -1.0
    means = torch.cumsum(ordered, 0) / torch.arange(1, ordered.numel() + 1, dtype=torch.float64)
    fits = means < threshold if strict else means <= threshold
    last_of_value = torch.ones_like(fits)
    last_of_value[:-1] = ordered[1:] > ordered[:-1]
    kept = ordered[fits & last_of_value]
    return float(kept[-1]) if kept.numel() else -1.0


def budget_clip(m2: Tensor, budget: float) -> float:
    """The bound c on |log-ratio| with mean(min(M2, c^2)) = budget; infinity when M2's mean is within it."""
    ordered = torch.sort(m2.double()).values
    count = ordered.numel()
    if count == 0 or float(ordered.mean()) <= budget:
        return math.inf
    below = torch.cumsum(ordered, 0) - ordered  # sum of what is smaller
    left = torch.arange(count, 0, -1, dtype=torch.float64)  # how many are cut at this value or above
    at_value = (below + left * ordered) / count
    first = int(torch.searchsorted(at_value, torch.tensor(budget, dtype=torch.float64)))
    square = (budget * count - float(below[first])) / float(left[first])
    return math.sqrt(max(square, 0.0))


def trust_region(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """[n] bool: tokens that an update would push further away: A > 0 and r > 1, or A < 0 and r < 1."""
    return ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
