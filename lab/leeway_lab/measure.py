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
Pairs = dict[tuple[int, int], Array]
"""(first run, second run) -> KL per sequence, [sequences]."""
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
        # One fixed set of prompts. 40 steps of 32 prompts see about a third of them once.
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


def floor_pairs(kl: Divergence, on_policy: Sequence[Weights]) -> Pairs:
    """(i, j) -> KL(run i || run j) per sequence, for ordered pairs of different seeds."""
    return _pairs(kl, on_policy, on_policy)


def deviations(
    kl: Divergence, method: Sequence[Weights], on_policy: Sequence[Weights], reverse: bool = False
) -> Pairs:
    """(i, j) -> KL(method run i || on-policy run j) per sequence; `reverse`: KL(on-policy i || method j).

    Runs with the same seed draw from generators of the same seed, which makes them alike beyond what the
    method does; those pairs are left out.
    """
    return _pairs(kl, on_policy, method) if reverse else _pairs(kl, method, on_policy)


def _pairs(kl: Divergence, ps: Sequence[Weights], qs: Sequence[Weights]) -> Pairs:
    found: Pairs = {}
    for i, p in enumerate(ps):
        others = [j for j in range(len(qs)) if j != i]
        found |= dict(zip(((i, j) for j in others), kl.kl(p, [qs[j] for j in others]), strict=True))
    return found


def ratio_to_floor(dev: Pairs, floor: Pairs, reverse: bool = False) -> Ratio:
    """Mean deviation over mean floor. `dev` has the method's runs first, or second with `reverse`.

    Bootstrap over runs and sequences: on-policy runs are drawn once for both means, which share them. A
    pair's mean over hundreds of sequences is drawn from its normal limit.
    """
    if reverse:
        dev = {(j, i): values for (i, j), values in dev.items()}
    rng = np.random.default_rng(0)
    method, on = (
        _times_drawn(rng, 1 + max(i for i, _ in dev)),
        _times_drawn(rng, 1 + max(j for _, j in floor)),
    )
    means = [
        _resampled_mean(rng, dev, method[:, :, None] * on[:, None, :]),
        _resampled_mean(rng, floor, on[:, :, None] * on[:, None, :]),
    ]
    low, high = np.nanquantile(means[0] / means[1], [0.025, 0.975])  # NaN: one run was drawn every time
    deviation, base = (float(np.mean([v.mean() for v in pairs.values()])) for pairs in (dev, floor))
    return Ratio(deviation / base, float(low), float(high), deviation, base)


def _times_drawn(rng: np.random.Generator, runs: int) -> Array:
    """[RESAMPLES, runs] how often each run is drawn when as many are drawn as there are."""
    return rng.multinomial(runs, [1 / runs] * runs, size=RESAMPLES).astype(np.float64)


def _resampled_mean(rng: np.random.Generator, pairs: Pairs, weights: Array) -> Array:
    """[RESAMPLES] weighted mean over the pairs that there are; weights [RESAMPLES, first, second]."""
    first, second = (list(axis) for axis in zip(*pairs, strict=True))
    mean = np.array([v.mean() for v in pairs.values()])
    error = np.array([v.std() / np.sqrt(len(v)) for v in pairs.values()])
    chosen = weights[:, first, second]
    values = mean + error * rng.standard_normal(chosen.shape)
    with np.errstate(invalid="ignore"):
        return np.asarray((chosen * values).sum(1) / chosen.sum(1))
