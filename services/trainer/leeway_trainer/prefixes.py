"""KL between the weights before and after a resync, on the old policy's prefixes and on the new one's own.

The old weights are still in theta_s when the new ones are published, so keeping them there until the first
fresh batch costs no memory: that batch is scored with them, and only then theta_s takes the new ones.

    batch k (old)    -> kl/sampler_prefix = KL(old || new), what everyone logs
    publish          -> theta_s stays old
    batch k+1 (new)  -> kl/self_prefix = KL(new || old), which sees where only the new policy goes
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
from leeway_trainer.batch import MicroBatch
from leeway_trainer.model import PolicyOutput
from leeway_trainer.policy import Policy
from leeway_trainer.step import micro_batches

Score = Callable[[MicroBatch], PolicyOutput]
LIMIT = 20.0


class PrefixScores:
    """Log-probabilities of the same responses under several weights, one after the other."""

    def __init__(self, policy: Policy, rollouts: Sequence[Rollout], config: RunConfig) -> None:
        # The first responses in slot order: whatever they say.
        self._ranks = policy.ranks
        # Ranks share the micro-batches, so there must be something for each.
        wanted = max(config.checks.self_prefix_responses, policy.ranks.size)
        self.samplers = [rollout.header.sampler for rollout in rollouts[:wanted]]
        self._batches = micro_batches(policy, rollouts[:wanted], config)

    def score(self, score: Score) -> Tensor:
        """[n] log-probs of the drawn tokens under one set of weights, on all ranks, float64 on the CPU."""
        return self._gather([score(batch).logp for batch in self._batches])

    def reported(self) -> tuple[Tensor, Tensor]:
        """[n] log mu and [n] the response that a token belongs to."""
        sequence = self._gather([batch.sequence.double() for batch in self._batches])
        return self._gather([batch.logp_mu for batch in self._batches]), sequence.long()

    def _gather(self, parts: list[Tensor]) -> Tensor:
        rows = [
            part.detach().double().cpu()
            for part, batch in zip(parts, self._batches, strict=True)
            if batch.counts
        ]
        column = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64)
        return self._ranks.gather_rows(column[:, None])[:, 0]


def per_sequence(values: Tensor, sequence: Tensor) -> Tensor:
    """[responses] sums of token values; errors are of responses, whose tokens go together."""
    _, inverse = torch.unique(sequence, return_inverse=True)
    zeros = torch.zeros(int(inverse.max()) + 1 if inverse.numel() else 0, dtype=values.dtype)
    return zeros.index_add(0, inverse, values)


def kl_estimate(logp: Tensor, logp_other: Tensor, sequence: Tensor) -> tuple[float, float]:
    """(KL(p || q), its standard error) in nats a token, from tokens that p drew: the mean of k3."""
    terms = k3((logp_other - logp).clamp(-LIMIT, LIMIT))
    sums, count = per_sequence(terms, sequence), max(terms.numel(), 1)
    spread = float(sums.std(correction=0)) * sums.numel() ** 0.5 if sums.numel() > 1 else 0.0
    return float(terms.sum()) / count, spread / count


def missing_share(
    logp_mu: Tensor, logp_old: Tensor, logp_new: Tensor, sequence: Tensor
) -> tuple[float, float]:
    """(share of the update from old to new that mu lacks, its standard error); 0: all arrived, 1: nothing.

    The slope of log mu - log pi_new on log pi_old - log pi_new. An engine's rounding is not aligned with the
    update, weights that did not arrive are. (0, inf) when the update did nothing to these tokens.
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
    """Metrics of the first fresh batch after a resync; tensors are [n], `samplers` is by response.

    `resync/*` is about the sampler that most certainly lacks something of the update: it must not hide among
    others.
    """
    kl, error = kl_estimate(logp_new, logp_old, sequence)
    names = sorted(set(samplers))
    owner = torch.tensor([names.index(name) for name in samplers])[sequence]
    found = {}
    for i, name in enumerate(names):
        own = owner == i
        found[name] = missing_share(logp_mu[own], logp_old[own], logp_new[own], sequence[own])
    worst = max(found, key=lambda name: found[name][0] / max(found[name][1], 1e-12))
    metrics: dict[str, float | str] = {"kl/self_prefix": kl, "kl/self_prefix_se": error}
    if math.isfinite(found[worst][1]):
        metrics |= {"resync/missing": found[worst][0], "resync/missing_se": found[worst][1]}
        metrics["resync/sampler"] = worst
    return metrics
