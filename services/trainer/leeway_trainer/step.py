"""One optimiser step on one batch: score with theta_s, correct, backward, update.

rollouts -> advantages, micro-batches of this rank
theta_s  -> log pi_s                      (no gradient)
theta    -> log pi_theta, surrogate loss  (backward per micro-batch)
lag and discrepancy of the whole batch, from raw ratios, over all ranks
clip, AdamW
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leeway.config import RunConfig
from leeway.corrections import Denominators, TokenBatch, advantages, lag_metrics, surrogate_loss
from leeway.messages import Rollout
from leeway_trainer.batch import MicroBatch, build_micro_batch, input_length, plan_micro_batches
from leeway_trainer.policy import NonFiniteError

if TYPE_CHECKING:
    from leeway_trainer.policy import Policy
    from leeway_trainer.snapshot import Snapshot

Metrics = dict[str, float]
Scores = tuple[Tensor, Tensor]


def train_step(
    policy: Policy,
    snapshot: Snapshot,
    rollouts: Sequence[Rollout],
    config: RunConfig,
    step: int,
    pause: Callable[[], None] = lambda: None,
) -> Metrics:
    """Train on the whole batch `rollouts` (slot order, the same on every rank); metrics of the global batch.

    `pause` is called between micro-batches, on every rank as often; it may raise to abandon the step before
    anything has changed. Raises NonFiniteError and then leaves the published weights as they were.
    """
    started = time.monotonic()
    batches = micro_batches(policy, rollouts, config)
    scores: list[Scores] = []
    for batch in batches:
        pause()
        scores.append(snapshot.score(batch))
    scored = time.monotonic()
    per_response = response_advantages(rollouts, config)
    counts = denominators(rollouts, config)
    totals = _Totals()
    for i, (batch, score) in enumerate(zip(batches, scores, strict=True)):
        pause()
        logp, head_logp = policy.forward(batch, last=i == len(batches) - 1)
        tokens = token_batch(batch, logp, head_logp, score, per_response, counts)
        loss, metrics = surrogate_loss(config.correction.method, tokens, config.correction)
        policy.backward(loss)
        totals.add(tokens, loss, metrics)
    lag = batch_lag(policy, totals.rows, config, step)
    result = policy.step(step)
    return {
        **reward_metrics(rollouts),
        **lag,
        **totals.pooled(policy),
        "grad_norm": result.grad_norm,
        "lr": result.learning_rate,
        "tokens": float(counts.tokens),
        "time/score_s": scored - started,
        "time/train_s": time.monotonic() - scored,
    }


def micro_batches(policy: Policy, rollouts: Sequence[Rollout], config: RunConfig) -> list[MicroBatch]:
    """This rank's micro-batches, on its device."""
    ranks = policy.ranks
    plan = plan_micro_batches(
        [input_length(r) for r in rollouts], config.trainer.micro_batch_tokens, ranks.size
    )
    return [
        build_micro_batch(
            [rollouts[i] for i in planned.sequences],
            planned.sequences,
            temperature=config.sampling.temperature,
            vocabulary=policy.vocabulary,
            device=ranks.device,
            counts=planned.counts,
        )
        for planned in plan[ranks.rank]
    ]


def response_advantages(rollouts: Sequence[Rollout], config: RunConfig) -> Tensor:
    """[responses] float32 in slot order; every requested response is in its group."""
    rewards = torch.tensor([r.header.reward for r in rollouts], dtype=torch.float64)
    groups = rewards.view(config.batch.prompts, config.batch.group_size)
    return advantages(groups, config.correction.advantage, config.correction.std_floor).flatten().float()


def denominators(rollouts: Sequence[Rollout], config: RunConfig) -> Denominators:
    """Counts of the global batch."""
    return Denominators(
        tokens=sum(int(r.response_ids.size) for r in rollouts),
        sequences=config.batch.size,
        max_tokens=config.sampling.max_new_tokens,
    )


def token_batch(
    batch: MicroBatch,
    logp: Tensor,
    head_logp: Tensor,
    score: Scores,
    per_response: Tensor,
    counts: Denominators,
) -> TokenBatch:
    """What corrections work on, for one micro-batch; one that does not count is masked out as a whole."""
    return TokenBatch(
        logp=logp,
        logp_sync=score[0],
        logp_mu=batch.logp_mu,
        advantages=per_response.to(logp.device)[batch.sequence],
        mask=torch.full_like(batch.sequence, batch.counts, dtype=torch.bool),
        seq_ids=batch.sequence,
        denominators=counts,
        head_logp_mu=batch.head_logp_mu,
        head_logp=head_logp,
        head_logp_sync=score[1],
        head_ids=batch.query.head_ids,
        head_mask=batch.query.head_mask,
        support_complete=batch.query.head_complete,
    )


def reward_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Rewards and lengths of a batch."""
    rewards = torch.tensor([r.header.reward for r in rollouts], dtype=torch.float64)
    lengths = torch.tensor([r.response_ids.size for r in rollouts], dtype=torch.float64)
    truncated = [r.header.finish_reason == "length" for r in rollouts]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/errors": float(sum(r.header.reward_error is not None for r in rollouts)),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": sum(truncated) / len(truncated),
    }


def batch_lag(policy: Policy, rows: list[Tensor], config: RunConfig, step: int) -> Metrics:
    """Lag and discrepancy of the global batch; rows: [n, 5] per micro-batch (see _Totals). Raises
    NonFiniteError.
    """
    every = policy.ranks.gather_rows(torch.cat(rows))
    logp, logp_sync, logp_mu, sequence, advantage = every.unbind(1)
    mask = torch.ones(every.shape[0], dtype=torch.bool)
    try:
        return lag_metrics(logp, logp_sync, logp_mu, mask, sequence.long(), advantage, config.correction)
    except ValueError as error:
        raise NonFiniteError(step, f"a log-ratio ({error})", float("nan")) from error


class _Totals:
    """Sums over the micro-batches of this rank."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self._loss = 0.0
        self._tokens = 0
        self._sums: dict[str, float] = {}

    def add(self, tokens: TokenBatch, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        columns = (tokens.logp, tokens.logp_sync, tokens.logp_mu, tokens.seq_ids, tokens.advantages)
        rows = torch.stack([c.detach().double() for c in columns], dim=1)
        self.rows.append(rows[tokens.mask].cpu())
        count = int(tokens.mask.sum())
        self._loss += float(loss.detach())
        self._tokens += count
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value) * count

    def pooled(self, policy: Policy) -> Metrics:
        """Loss of the global batch, and token means of the method's own metrics."""
        names = sorted(self._sums)
        loss, tokens, *sums = policy.ranks.sum([self._loss, self._tokens, *(self._sums[n] for n in names)])
        return {
            "loss": loss,
            **{name: total / max(tokens, 1) for name, total in zip(names, sums, strict=True)},
        }
