"""One optimiser step on one batch: score with theta_s, correct, backward, update.

rollouts -> advantages, micro-batches of this rank
theta_s  -> log pi_s                      (no gradient)
theta    -> log pi_theta                  (no gradient, only for methods that prepare on the whole batch)
theta    -> log pi_theta, surrogate loss  (backward per micro-batch)
lag and discrepancy of the whole batch, from raw ratios, over all ranks
clip, AdamW

In the first step after a resync theta and theta_s are the same, bit for bit, unless weights are rounded on
the wire: log pi_s is then log pi_theta, and no pass is made twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leeway.config import CorrectionConfig, RunConfig
from leeway.corrections import (
    METHODS,
    Denominators,
    TokenBatch,
    advantages,
    lag_metrics,
    lr_scale,
    predict_crossing,
    prepare,
    surrogate_loss,
    tail_weight,
)
from leeway.corrections.lag import k3
from leeway.corrections.primitives import tail_kappa
from leeway.messages import Rollout
from leeway.metrics import StepData, measure
from leeway.metrics.areas.data import DATA_DENOMINATOR_SEQUENCES, DATA_DENOMINATOR_TOKENS
from leeway.metrics.areas.discrepancy import DISC_KL_SAMPLER
from leeway.metrics.areas.lag import (
    LAG_PREDICTED_CROSSING_SEQ,
    LAG_PREDICTED_CROSSING_TOK,
    LAG_VAR,
    LAG_VAR_SEQ,
)
from leeway.metrics.areas.time import TIME_SCORE_S, TIME_TRAIN_S
from leeway.metrics.areas.tokens import TOKENS
from leeway.metrics.areas.trainer import GRAD_NORM, LOSS, LR
from leeway.telemetry.tracing import span
from leeway_trainer.batch import MicroBatch, rank_micro_batches
from leeway_trainer.errors import NonFiniteError
from leeway_trainer.head import TailQuery

if TYPE_CHECKING:
    from leeway_trainer.model import PolicyOutput, TokenHead
    from leeway_trainer.policy import Policy
    from leeway_trainer.snapshot import Snapshot

Metrics = dict[str, float]
FARTHEST = 10_000.0


def train_step(
    policy: Policy,
    snapshot: Snapshot,
    rollouts: Sequence[Rollout],
    config: RunConfig,
    step: int,
    pause: Callable[[], None] = lambda: None,
    age: int = 0,
) -> Metrics:
    """Train on the whole batch `rollouts` (slot order, the same on every rank); metrics of the global batch.

    `age`: optimiser steps done since the weights that the rollouts were drawn under were published.
    `pause` is called between micro-batches, equally often on every rank; it may raise to abandon the step
    before anything changes. Raises NonFiniteError; nothing that is published changes then.
    """
    started = time.monotonic()
    batches = micro_batches(policy, rollouts, config)
    with_tail = config.correction.needs_sync_tail
    correction = config.correction
    prepares = METHODS[correction.method].prepare is not None
    same = age == 0 and snapshot.equals(policy)
    one_pass = same and not prepares and not with_tail
    scores: list[PolicyOutput] = []
    with span("score", {"leeway.micro_batches": len(batches)}):
        for batch in () if one_pass else batches:
            pause()
            scores.append(snapshot.score(batch, with_tail))
    scored = time.monotonic()
    per_response = response_advantages(rollouts, config)
    counts = denominators(rollouts, config)

    def tokens_of(i: int, output: PolicyOutput) -> TokenBatch:
        batch = token_batch(batches[i], output, scores[i], per_response, counts)
        return replace(batch, age=torch.full_like(batch.logp, float(age)))

    prepared = None
    if prepares:
        before = _Totals()
        with span("prepare"):
            for i, batch in enumerate(batches):
                pause()
                before.add(tokens_of(i, scores[i] if same else policy.score(batch)))
            prepared = prepare(global_batch(policy, before.rows, counts), correction)
    totals = _Totals()
    with span("forward_backward", {"leeway.tokens": counts.tokens}):
        for i, batch in enumerate(batches):
            pause()
            with snapshot.output_layer() if with_tail else nullcontext():
                tail = None
                if with_tail:
                    tail = tail_query(batch, scores[i], snapshot.head, per_response, correction)
                output = policy.forward(batch, last=i == len(batches) - 1, tail=tail)
                if one_pass:
                    scores.append(output.detached())
                tokens = replace(tokens_of(i, output), prepared=prepared)
                loss, metrics = surrogate_loss(tokens, correction)
                policy.backward(loss)
            totals.add(tokens, loss, metrics)
    every = global_batch(policy, totals.rows, counts)
    lag = batch_lag(every, config, step)
    scale = lr_scale(every, correction)
    with span("optimizer"):
        result = policy.step(step, scale)
    return {
        **measure(StepData(step, age, every, rollouts)),
        **lag,
        **crossings(lag, age, config.sync.ess_threshold or 0.5),
        **sampler_discrepancy(every, rollouts),
        **totals.pooled(policy),
        GRAD_NORM: result.grad_norm,
        LR: result.learning_rate,
        TOKENS: float(counts.tokens),
        DATA_DENOMINATOR_SEQUENCES: float(counts.sequences),
        DATA_DENOMINATOR_TOKENS: float(counts.tokens),
        TIME_SCORE_S: scored - started,
        TIME_TRAIN_S: time.monotonic() - scored,
    }


def micro_batches(policy: Policy, rollouts: Sequence[Rollout], config: RunConfig) -> list[MicroBatch]:
    """This rank's micro-batches, on its device."""
    ranks = policy.ranks
    return rank_micro_batches(
        rollouts,
        budget_tokens=config.trainer.micro_batch_tokens,
        temperature=config.sampling.temperature,
        vocabulary=policy.vocabulary,
        packed=policy.model.shares_prompts,
        rank=ranks.rank,
        ranks=ranks.size,
        device=ranks.device,
    )


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


def tail_query(
    batch: MicroBatch,
    score: PolicyOutput,
    head: TokenHead,
    per_response: Tensor,
    config: CorrectionConfig,
) -> TailQuery:
    """theta_s, with output layer `head`, at the positions of a micro-batch: the tail of a centre is pi_s."""
    assert score.hidden is not None
    ref, f = tail_weight(config)
    query = batch.query
    kappa = tail_kappa(query.head_ids, query.head_mask, batch.head_logp_mu, score.head_logp)
    return TailQuery(
        hidden=score.hidden,
        weight=head.weight,
        bias=head.bias,
        advantages=per_response.to(kappa.device)[batch.sequence],
        kappa_ref=kappa if ref == "mu" else torch.ones_like(kappa),
        f=f,
    )


def token_batch(
    batch: MicroBatch,
    output: PolicyOutput,
    score: PolicyOutput,
    per_response: Tensor,
    counts: Denominators,
) -> TokenBatch:
    """The input of corrections for one micro-batch; one that does not count is masked completely."""
    return TokenBatch(
        logp=output.logp,
        logp_sync=score.logp,
        logp_mu=batch.logp_mu,
        advantages=per_response.to(output.logp.device)[batch.sequence],
        mask=torch.full_like(batch.sequence, batch.counts, dtype=torch.bool),
        seq_ids=batch.sequence,
        denominators=counts,
        head_logp_mu=batch.head_logp_mu,
        head_logp=output.head_logp,
        head_logp_sync=score.head_logp,
        head_ids=batch.query.head_ids,
        head_mask=batch.query.head_mask,
        support_complete=batch.query.head_complete,
        tail_logp=output.tail_logp,
    )


def global_batch(policy: Policy, rows: list[Tensor], counts: Denominators) -> TokenBatch:
    """All trained tokens of all ranks, float64 on the CPU, without heads; rows: [n, 5] per micro-batch."""
    logp, logp_sync, logp_mu, sequence, advantage = policy.ranks.gather_rows(torch.cat(rows)).unbind(1)
    mask = torch.ones_like(logp, dtype=torch.bool)
    return TokenBatch(logp, logp_sync, logp_mu, advantage, mask, sequence.long(), counts)


def batch_lag(every: TokenBatch, config: RunConfig, step: int) -> Metrics:
    """Lag and discrepancy of the global batch. Raises NonFiniteError."""
    try:
        return lag_metrics(
            every.logp,
            every.logp_sync,
            every.logp_mu,
            every.mask,
            every.seq_ids,
            every.advantages,
            config.correction,
        )
    except ValueError as error:
        raise NonFiniteError(step, f"a log-ratio ({error})", float("nan")) from error


def crossings(lag: Metrics, age: int, threshold: float) -> Metrics:
    """Forecast of the age at which ESS falls to `threshold`, by level. Without lag there is no forecast: one
    beyond FARTHEST steps is rounding error.
    """
    found = {
        name: predict_crossing(lag[variance], age, threshold)
        for name, variance in (
            (LAG_PREDICTED_CROSSING_TOK, LAG_VAR),
            (LAG_PREDICTED_CROSSING_SEQ, LAG_VAR_SEQ),
        )
    }
    return {name: value for name, value in found.items() if value <= FARTHEST}


def sampler_discrepancy(every: TokenBatch, rollouts: Sequence[Rollout]) -> Metrics:
    """`disc/kl/<sampler>` for a batch drawn by several samplers, to find one that is broken."""
    names = [rollout.header.sampler for rollout in rollouts]
    known = sorted(set(names))
    if len(known) < 2:
        return {}
    owner = torch.tensor([known.index(name) for name in names])[every.seq_ids.cpu()]
    kl = k3((every.logp_sync - every.logp_mu).clamp(-20, 20))
    return {DISC_KL_SAMPLER.of(name): float(kl[owner == i].mean()) for i, name in enumerate(known)}


class _Totals:
    """Sums over the micro-batches of this rank."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self._loss = 0.0
        self._tokens = 0
        self._sums: dict[str, float] = {}

    def add(
        self, tokens: TokenBatch, loss: Tensor | None = None, metrics: Mapping[str, Tensor] | None = None
    ) -> None:
        columns = (tokens.logp, tokens.logp_sync, tokens.logp_mu, tokens.seq_ids, tokens.advantages)
        rows = torch.stack([c.detach().double() for c in columns], dim=1)
        self.rows.append(rows[tokens.mask].cpu())
        count = int(tokens.mask.sum())
        self._loss += 0.0 if loss is None else float(loss.detach())
        self._tokens += count
        for name, value in (metrics or {}).items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value) * count

    def pooled(self, policy: Policy) -> Metrics:
        """Loss of the global batch, and token means of the method's own metrics."""
        names = sorted(self._sums)
        loss, tokens, *sums = policy.ranks.sum([self._loss, self._tokens, *(self._sums[n] for n in names)])
        return {
            LOSS: loss,
            **{name: total / max(tokens, 1) for name, total in zip(names, sums, strict=True)},
        }
