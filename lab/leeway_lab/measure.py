"""KL between runs on fresh prefixes, the noise floor, and bootstrap intervals of ratios to it.

KL(p || q) is taken on responses drawn from p, its first argument, by p in the trainer's numerics, as the sum
over positions of the exact divergence at each prefix (Rao-Blackwell). The floor at a mark is the mean over
ordered pairs of on-policy runs that differ in their seed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from leeway.corrections import kl_rao_blackwell
from leeway_lab.model import Task, draw, response_logp

Array = NDArray[np.float64]
Weights = dict[str, Tensor]
RESAMPLES = 2000


class Divergence:
    """KL between weights of one model. `sequences` fresh responses per first argument."""

    def __init__(self, model: nn.Module, task: Task, sequences: int) -> None:
        self.p, self.q = model, copy.deepcopy(model)
        self.task, self.sequences = task, sequences

    @torch.no_grad()
    def kl(self, p: Weights, others: Sequence[Weights]) -> list[Array]:
        """For each q of `others` [sequences]: KL(p || q) of each response drawn from p, nats per sequence."""
        _load(self.p, p)
        # Prompts that training never used: the end of the data set.
        prompts = self.task.prompts[-self.sequences :]
        drawn = draw(self.p, prompts, self.task.max_new, self.task.eos, torch.Generator().manual_seed(7))
        found = []
        for q in others:
            _load(self.q, q)
            per_token = kl_rao_blackwell(drawn.logp, response_logp(self.q, drawn))
            found.append(torch.where(drawn.mask, per_token, 0.0).sum(1).double().numpy())
        return found


def _load(model: nn.Module, weights: Weights) -> None:
    model.load_state_dict(weights, strict=False)  # the tied output layer is not kept


@dataclass(frozen=True)
class Ratio:
    """dev / floor with a 95 % bootstrap interval, and both in nats per sequence."""

    value: float
    low: float
    high: float
    deviation: float
    floor: float


def floor_pairs(kl: Divergence, on_policy: Sequence[Weights]) -> dict[tuple[int, int], Array]:
    """(i, j) -> KL(run i || run j) per sequence, for ordered pairs of different seeds."""
    return _pairs(kl, on_policy, on_policy)


def deviations(
    kl: Divergence, method: Sequence[Weights], on_policy: Sequence[Weights], reverse: bool = False
) -> dict[tuple[int, int], Array]:
    """(i, j) -> KL(method run i || on-policy run j) per sequence; `reverse`: KL(on-policy i || method j).

    Runs with the same seed draw from generators of the same seed, which makes them alike beyond what the
    method does; those pairs are left out.
    """
    return _pairs(kl, on_policy, method) if reverse else _pairs(kl, method, on_policy)


def _pairs(kl: Divergence, ps: Sequence[Weights], qs: Sequence[Weights]) -> dict[tuple[int, int], Array]:
    found: dict[tuple[int, int], Array] = {}
    for i, p in enumerate(ps):
        others = [j for j in range(len(qs)) if j != i]
        found |= dict(zip(((i, j) for j in others), kl.kl(p, [qs[j] for j in others]), strict=True))
    return found


def ratio_to_floor(dev: dict[tuple[int, int], Array], floor: dict[tuple[int, int], Array]) -> Ratio:
    """Mean deviation over mean floor; seeds and sequences are resampled together."""
    rng = np.random.default_rng(0)
    deviation, base = _mean(dev), _mean(floor)
    means = [_resampled(rng, dev) / _resampled(rng, floor) for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return Ratio(deviation / base, float(low), float(high), deviation, base)


def _mean(pairs: dict[tuple[int, int], Array]) -> float:
    return float(np.mean([values.mean() for values in pairs.values()]))


def _resampled(rng: np.random.Generator, pairs: dict[tuple[int, int], Array]) -> float:
    # Two-way bootstrap: draw the first and the second runs with replacement, each pair by its weight.
    firsts, seconds = (sorted({key[axis] for key in pairs}) for axis in (0, 1))
    weights = [
        dict(zip(names, rng.multinomial(len(names), [1 / len(names)] * len(names)), strict=True))
        for names in (firsts, seconds)
    ]
    total, mass = 0.0, 0.0
    for (i, j), values in pairs.items():
        weight = float(weights[0][i] * weights[1][j])
        if weight:
            sample = values[rng.integers(0, len(values), len(values))]
            total, mass = total + weight * float(sample.mean()), mass + weight
    return total / mass if mass else _mean(pairs)
