"""KL between the weights before and after a resync, on responses drawn under the old and under the new ones.

The old weights are still in theta_s when the new ones are published (`leeway_trainer.versions`):

    last batch under the old weights    -> kl/sampler_prefix = KL(old || new), the usual one
    publish                             -> theta_s stays old
    first batch under the new weights   -> kl/self_prefix = KL(new || old), which also sees prefixes that only
                                           the new policy reaches
                                        -> theta_s becomes new
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from leeway.config import RunConfig
from leeway.corrections.lag import k3
from leeway.messages import Rollout
from leeway.metrics.areas.resync import (
    KL_SAMPLER_PREFIX,
    KL_SELF_PREFIX,
    KL_SELF_PREFIX_SE,
    RESYNC_MISSING,
    RESYNC_MISSING_SE,
    RESYNC_SAMPLER,
)
from leeway_trainer.batch import MicroBatch
from leeway_trainer.model import PolicyOutput
from leeway_trainer.policy import Policy
from leeway_trainer.snapshot import Snapshot
from leeway_trainer.step import micro_batches

Score = Callable[[MicroBatch], PolicyOutput]
LIMIT = 20.0
"""Bound on a log-ratio, in nats."""


class ResyncKl:
    """Scores a few responses of one batch under theta and theta_s. Called by all ranks.

    These are the first `checks.self_prefix_responses` in slot order, whatever they contain, and at least one
    per rank, because ranks share the micro-batches.
    """

    def __init__(
        self, policy: Policy, theta_s: Snapshot, rollouts: Sequence[Rollout], config: RunConfig
    ) -> None:
        self._policy, self._theta_s, self._ranks = policy, theta_s, policy.ranks
        chosen = rollouts[: max(config.checks.self_prefix_responses, policy.ranks.size)]
        self._samplers = [rollout.header.sampler for rollout in chosen]
        self._batches = micro_batches(policy, chosen, config)

    def before(self) -> dict[str, float]:
        """On the last batch of the old weights, which theta_s holds, before theta is published."""
        old, new = self._scores(self._theta_s.score), self._scores(self._policy.score)
        return {KL_SAMPLER_PREFIX: kl_estimate(old, new, self._sequence())[0]}

    def around(self, renew: Callable[[], None]) -> dict[str, float | str]:
        """On the first batch of the new weights: scored with the old ones, then `renew` is called, which
        makes theta_s hold the new ones.
        """
        old = self._scores(self._theta_s.score)
        renew()
        sequence = self._sequence()
        logp_mu = self._gather([batch.logp_mu for batch in self._batches])
        new = self._scores(self._theta_s.score)
        return self_prefix_metrics(logp_mu, old, new, sequence, self._samplers)

    def _scores(self, score: Score) -> Tensor:
        """[n] log-probs of the drawn tokens under one set of weights, of all ranks, float64 on the CPU."""
        return self._gather([score(batch).logp for batch in self._batches])

    def _sequence(self) -> Tensor:
        """[n] the response that a token belongs to."""
        return self._gather([batch.sequence.double() for batch in self._batches]).long()

    def _gather(self, parts: list[Tensor]) -> Tensor:
        rows = [
            part.detach().double().cpu()
            for part, batch in zip(parts, self._batches, strict=True)
            if batch.counts
        ]
        column = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64)
        return self._ranks.gather_rows(column[:, None])[:, 0]


def per_sequence(values: Tensor, sequence: Tensor) -> Tensor:
    """[responses] sums of token values: tokens of one response are correlated, responses are not."""
    _, inverse = torch.unique(sequence, return_inverse=True)
    zeros = torch.zeros(int(inverse.max()) + 1 if inverse.numel() else 0, dtype=values.dtype)
    return zeros.index_add(0, inverse, values)


def kl_estimate(logp: Tensor, logp_other: Tensor, sequence: Tensor) -> tuple[float, float]:
    """(KL(p || q), its standard error) in nats per token, from tokens drawn by p: the mean of k3."""
    terms = k3((logp_other - logp).clamp(-LIMIT, LIMIT))
    sums, count = per_sequence(terms, sequence), max(terms.numel(), 1)
    spread = float(sums.std(correction=0)) * sums.numel() ** 0.5 if sums.numel() > 1 else 0.0
    return float(terms.sum()) / count, spread / count


def missing_share(
    logp_mu: Tensor, logp_old: Tensor, logp_new: Tensor, sequence: Tensor
) -> tuple[float, float]:
    """(share of the update from old to new that mu lacks, its standard error); 0: all arrived, 1: nothing.

    The slope of log mu - log pi_new on log pi_old - log pi_new. The rounding of an engine does not correlate
    with the update; weights that did not arrive do. (0, inf) when the update did not change these tokens.
    """
    x = (logp_old - logp_new).clamp(-LIMIT, LIMIT)
    y = (logp_mu - logp_new).clamp(-LIMIT, LIMIT)
    size = float((x * x).sum())
    if size <= 0:
        return 0.0, math.inf
    slope = float((x * y).sum()) / size
    return slope, float(per_sequence(x * (y - slope * x), sequence).norm()) / size


def self_prefix_metrics(
    logp_mu: Tensor, logp_old: Tensor, logp_new: Tensor, sequence: Tensor, samplers: Sequence[str]
) -> dict[str, float | str]:
    """Metrics of the first batch drawn under new weights; tensors are [n]; `samplers`: by response.

    `resync/*` describes the sampler that most certainly lacks part of the update, so that the others do not
    hide it.
    """
    kl, error = kl_estimate(logp_new, logp_old, sequence)
    names = sorted(set(samplers))
    owner = torch.tensor([names.index(name) for name in samplers])[sequence]
    found = {}
    for i, name in enumerate(names):
        own = owner == i
        found[name] = missing_share(logp_mu[own], logp_old[own], logp_new[own], sequence[own])
    worst = max(found, key=lambda name: found[name][0] / max(found[name][1], 1e-12))
    metrics: dict[str, float | str] = {KL_SELF_PREFIX: kl, KL_SELF_PREFIX_SE: error}
    if math.isfinite(found[worst][1]):
        metrics |= {RESYNC_MISSING: found[worst][0], RESYNC_MISSING_SE: found[worst][1]}
        metrics[RESYNC_SAMPLER] = worst
    return metrics
