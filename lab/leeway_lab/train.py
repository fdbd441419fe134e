"""One run of the lab: sample, correct, step, measure, maybe resync; the product's corrections and policy.

sampler (weights of theta_s, its numerics) -> responses with full mu
theta_s (trainer numerics)                 -> pi_s over the vocabulary
theta                                      -> surrogate_loss -> AdamW or SGD
decide_resync                              -> theta_s <- theta
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from leeway.config import build_correction
from leeway.corrections import (
    Denominators,
    TokenBatch,
    advantages,
    kl_rao_blackwell,
    lag_metrics,
    lr_scale,
    prepare,
    surrogate_loss,
)
from leeway.metrics.areas.lag import LAG_AGE, LAG_VAR
from leeway.metrics.areas.response import RESPONSE_LENGTH_MEAN
from leeway.metrics.areas.resync import KL_SAMPLER_PREFIX
from leeway.metrics.areas.reward import REWARD_MEAN
from leeway.metrics.areas.trainer import GRAD_NORM
from leeway.policies import decide_resync, read_facts
from leeway_lab import batch_faults
from leeway_lab.model import Drawn, Sampler, Task, draw, load_base, response_logp
from leeway_lab.spec import RunSpec

Rows = list[dict[str, float]]


@dataclass
class RunResult:
    """Result of a run: a row of metrics per step, resyncs, and the weights at its marks."""

    rows: Rows = field(default_factory=list)
    resyncs: list[tuple[int, str]] = field(default_factory=list)
    """(step after which, reason)"""
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Mark -> state of theta after so many steps."""


class Trainer:
    """theta, theta_s and the sampler of one run."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.theta, tokenizer = load_base(spec.model)
        self.theta.requires_grad_(True)
        self.task = Task(spec.model, tokenizer)
        self.theta_s = copy.deepcopy(self.theta).requires_grad_(False)
        self.sampler = Sampler(self.theta, spec.condition, seed=spec.seed)
        parameters = [p for p in self.theta.parameters() if p.requires_grad]
        if spec.optimizer == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=spec.learning_rate)
        else:
            self.optimizer = torch.optim.AdamW(
                parameters, lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
            )
        self.synced_at = 0
        self.resync()

    def resync(self) -> None:
        """Load the current weights into the sampler."""
        self.theta_s.load_state_dict(self.theta.state_dict())
        self.sampler.load(self.theta)

    def state(self) -> dict[str, Tensor]:
        """A copy of the current weights; the output layer is tied to the embedding and left out."""
        return {k: v.detach().clone() for k, v in self.theta.state_dict().items() if k != "lm_head.weight"}

    def items(self, step: int) -> list[int]:
        """Prompts of batch `step`: the same for every seed and method."""
        count, size = self.spec.prompts, self.task.size
        order = np.random.default_rng(step * count // size).permutation(size)
        return [int(order[i % size]) for i in range(step * count, (step + 1) * count)]

    def sample(self, step: int) -> tuple[list[int], Drawn, Tensor]:
        """The batch's items, one per response, the responses as the trainer gets them, and rewards [B]."""
        spec, fault = self.spec, self.spec.fault
        group = spec.group_size * (batch_faults.OVERSAMPLING if fault == "first_finished" else 1)
        items = [i for i in self.items(step) for _ in range(group)]
        generator = torch.Generator().manual_seed(1_000_003 * spec.seed + step)
        top_p = batch_faults.TOP_P if fault in ("top_p", "top_p_reported") else 1.0
        prompts, task = self.task.prompts[items], self.task
        drawn = draw(self.sampler.model, prompts, task.max_new, task.eos, generator, top_p)
        if fault == "first_finished":
            rows = batch_faults.first_finished(drawn, spec.group_size)
            items, drawn = [items[i] for i in rows.tolist()], batch_faults.take(drawn, rows)
        rewards = task.rewards(items, drawn)
        if fault == "top_p":  # what is reported is the model's own distribution, without the cut
            whole = replace(drawn, support=None)
            drawn = replace(whole, logp=response_logp(self.sampler.model, whole).detach())
        if fault == "retokenised":
            drawn = batch_faults.respelled(drawn, task.digits, task.spare, generator)
        return items, drawn, rewards

    def batch(self, drawn: Drawn, rewards: Tensor, age: int) -> TokenBatch:
        """The typed batch of corrections, with all three policies over the whole vocabulary."""
        spec = self.spec
        kept = torch.ones(len(rewards), dtype=torch.bool)
        if spec.fault == "reward_filter":
            kept = rewards >= batch_faults.LEAST_REWARD
        mask = drawn.mask & kept[:, None]
        logp = response_logp(self.theta, drawn)[mask]
        with torch.no_grad():
            sync = logp.detach() if age == 0 else response_logp(self.theta_s, drawn)[mask]
        mu, tokens = drawn.logp[mask], drawn.responses[mask][:, None]
        per_response = self.advantages(rewards, kept)
        owner = torch.arange(len(mask))[:, None].expand_as(mask)[mask]

        def at(x: Tensor) -> Tensor:
            return x.gather(1, tokens)[:, 0]

        return TokenBatch(
            logp=at(logp), logp_sync=at(sync), logp_mu=at(mu),
            advantages=per_response[owner].float(),
            mask=torch.ones_like(owner, dtype=torch.bool),
            seq_ids=owner,
            denominators=Denominators(len(owner), int(kept.sum()), self.task.max_new),
            head_logp=logp, head_logp_sync=sync, head_logp_mu=mu,
            age=torch.full((len(owner),), float(age)),
        )  # fmt: skip

    def advantages(self, rewards: Tensor, kept: Tensor) -> Tensor:
        """[B]; a filtered group is normalised over what is left of it, and what was dropped has none."""
        spec, found = self.spec, torch.zeros_like(rewards)
        for start in range(0, len(rewards), spec.group_size):
            rows = start + kept[start : start + spec.group_size].nonzero()[:, 0]
            if len(rows):
                one = advantages(rewards[rows][None], spec.correction.advantage, spec.correction.std_floor)
                found[rows] = one[0]
        return found

    def gradient_step(self, batch: TokenBatch, step: int) -> tuple[float, dict[str, float]]:
        """One optimiser step; norm of the gradient, and the method's metrics."""
        correction = self.spec.correction
        batch = replace(batch, prepared=prepare(batch, correction))
        loss, metrics = surrogate_loss(batch, correction)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(nn.utils.clip_grad_norm_(self.theta.parameters(), float("inf")))
        rate = self.spec.learning_rate * min(1.0, (step + 1) / max(1, self.spec.warmup))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * lr_scale(batch, correction)
        if np.isfinite(norm):
            self.optimizer.step()
        return norm, {name: float(value) for name, value in metrics.items()}

    def step(self, step: int) -> dict[str, float]:
        """Batch `step`; the row of metrics."""
        _, drawn, rewards = self.sample(step)
        age = step - self.synced_at
        batch = self.batch(drawn, rewards, age)
        lag = lag_metrics(
            batch.logp, batch.logp_sync, batch.logp_mu, batch.mask, batch.seq_ids, batch.advantages,
            self.spec.correction,
        )  # fmt: skip
        excess = self.squared_norms(batch) if self.spec.excess else {}
        norm, metrics = self.gradient_step(batch, step)
        return {
            "step": float(step),
            REWARD_MEAN: float(rewards.mean()),
            "reward/exact": float((rewards == 1).double().mean()),
            RESPONSE_LENGTH_MEAN: float(drawn.mask.sum() / len(drawn.mask)),
            KL_SAMPLER_PREFIX: _kl_at(batch),
            LAG_AGE: float(age),
            GRAD_NORM: norm,
            "lag/sd": lag[LAG_VAR] ** 0.5,
            "split/error": _split_error(batch),
            **lag,
            **metrics,
            **excess,
        }

    def evaluate(self) -> dict[str, float]:
        """Mean reward and length of the policy's own responses to a fixed set of prompts."""
        items = list(range(self.task.size - 8 * self.spec.prompts, self.task.size))
        generator = torch.Generator().manual_seed(11)
        drawn = draw(self.theta, self.task.prompts[items], self.task.max_new, self.task.eos, generator)
        rewards = self.task.rewards(items, drawn)
        return {"own/reward": float(rewards.mean()), "own/length": float(drawn.mask.sum() / len(items))}

    def squared_norms(self, batch: TokenBatch) -> dict[str, float]:
        """|E g|^2 of score centring and of token importance sampling at the current weights.

        As the inner product of the gradients of two halves of the batch (prompts apart): the square of one
        gradient would mostly measure its noise, which importance weights make larger.
        """
        parameters = list(self.theta.parameters())
        first = batch.seq_ids // self.spec.group_size % 2 == 0
        found = {}
        for name, method in (("excess/sc_sq", "score_centering"), ("excess/is_sq", "is")):
            correction = build_correction({**self.spec.correction.common(), "method": method})
            halves = []
            for half in (first, ~first):
                loss, _ = surrogate_loss(replace(batch, mask=half), correction)
                gradient = torch.autograd.grad(loss, parameters, retain_graph=True)
                halves.append(2 * torch.cat([g.double().flatten() for g in gradient]))
            found[name] = float(halves[0] @ halves[1])
        return found


def _split_error(batch: TokenBatch) -> float:
    """Largest |full log-ratio - (lag + discrepancy)| of the batch, nats."""
    full = batch.logp.detach() - batch.logp_mu
    lag, discrepancy = batch.logp.detach() - batch.logp_sync, batch.logp_sync - batch.logp_mu
    return float((full - (lag + discrepancy)).abs().max())


def _kl_at(batch: TokenBatch) -> float:
    """Mean KL(pi_theta || pi_s) per token on the sampler's own prefixes."""
    assert batch.head_logp is not None
    assert batch.head_logp_sync is not None
    return float(kl_rao_blackwell(batch.head_logp.detach(), batch.head_logp_sync).mean())


def train(spec: RunSpec) -> RunResult:
    """The whole run; deterministic in `spec` for one version of torch and one thread."""
    trainer, result = Trainer(spec), RunResult()
    if 0 in spec.marks:
        result.weights[0] = trainer.state()
    for step in range(spec.steps):
        row = trainer.step(step)
        result.rows.append(row)
        done = step + 1
        if spec.evaluate_every and done % spec.evaluate_every == 0:
            row |= trainer.evaluate()
        if done in spec.marks:
            result.weights[done] = trainer.state()
        facts = read_facts(row, step=step, age=done - trainer.synced_at, last=done == spec.steps)
        reason = decide_resync(facts, spec.sync).reason
        if reason is not None:
            trainer.resync()
            trainer.synced_at = done
            result.resyncs.append((step, reason))
    return result
