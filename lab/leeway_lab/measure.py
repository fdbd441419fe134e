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
RESAMPLES = 2000


class Divergence:
    """KL between weights of one model. `sequences` fresh responses per first argument."""

    def __init__(self, model: nn.Module, task: Task, sequences: int) -> None:
        self.p, self.q = model, copy.deepcopy(model)
        self.task, self.sequences = task, sequences

    @torch.no_grad()
    def kl(self, p: dict[str, Tensor], q: dict[str, Tensor]) -> Array:
        """[sequences] KL(p || q) of each response drawn from p, nats per sequence."""
        for model, weights in ((self.p, p), (self.q, q)):
            model.load_state_dict(weights, strict=False)  # the tied output layer is not kept
        # Prompts that training never used: the end of the data set.
        prompts = self.task.prompts[-self.sequences :]
        drawn = draw(self.p, prompts, self.task.max_new, self.task.eos, torch.Generator().manual_seed(7))
        logp, logq = (response_logp(m, drawn.ids, drawn.prompt) for m in (self.p, self.q))
        per_token = torch.where(drawn.mask, kl_rao_blackwell(logp, logq), 0.0)
        return per_token.sum(1).double().numpy()


@dataclass(frozen=True)
class Ratio:
    """dev / floor with a 95 % bootstrap interval, and both in nats per sequence."""

    value: float
    low: float
    high: float
    deviation: float
    floor: float


def floor_pairs(kl: Divergence, on_policy: Sequence[dict[str, Tensor]]) -> dict[tuple[int, int], Array]:
    """(i, j) -> KL(run i || run j) per sequence, for ordered pairs of different seeds."""
    n = len(on_policy)
    return {(i, j): kl.kl(on_policy[i], on_policy[j]) for i in range(n) for j in range(n) if i != j}


def deviations(
    kl: Divergence,
    method: Sequence[dict[str, Tensor]],
    on_policy: Sequence[dict[str, Tensor]],
    reverse: bool = False,
) -> dict[tuple[int, int], Array]:
    """(i, j) -> KL(method run i || on-policy run j) per sequence; `reverse`: the other way round.

    Runs with the same seed draw from generators of the same seed, which makes them alike beyond what the
    method does; those pairs are left out when there is more than one seed.
    """
    pairs = {}
    for i, m in enumerate(method):
        for j, o in enumerate(on_policy):
            if i != j or len(on_policy) == 1:
                pairs[i, j] = kl.kl(o, m) if reverse else kl.kl(m, o)
    return pairs


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
