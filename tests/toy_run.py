"""A whole run as numbers: a bigram language model, a sampler with its own numerics, a trainer that learns.

It makes the very messages and metrics that the services make, through the functions that they use, so that
checks can be tried on many seeds and on planted faults in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from leeway.checks.facts import trained_facts
from leeway.config import RunConfig
from leeway.config.load import build_config
from leeway.corrections import Denominators, TokenBatch, lag_metrics
from leeway.messages import (
    Fields,
    Probe,
    ReportHeader,
    Rollout,
    RolloutHeader,
    SamplerStatus,
    draw_digest,
    encode,
)
from leeway.metrics import StepData, measure
from leeway_sampler.generation import Generation, Head, trim_heads
from leeway_sampler.probe import build_probe
from leeway_trainer.prefixes import kl_estimate, self_prefix_metrics

VOCABULARY, EOS, BAD, GOOD = 32, 1, 30, 9
MODES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 12, "temperature": 1.2},
    "top_p": {"top_p": 0.9, "top_k": 16},
    "min_p": {"min_p": 0.05, "top_k": 16},
}
"""Ways of sampling that all must look on-policy."""


def toy_config(sampling: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """A configuration of the toy; two resyncs in ten steps."""
    data: dict[str, Any] = {
        "task": {"kind": "digits"},
        "sampling": {"max_new_tokens": 24, "head_tokens": 16, **(sampling or {})},
        "batch": {"prompts": 8, "group_size": 8},
        "sync": {"max_age": 5},
        "checks": {"sample_fraction": 1.0},
    }
    return build_config({**data, **sections})


def log_softmax(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        top = x - x.max(-1, keepdims=True)
        return top - np.log(np.exp(top).sum(-1, keepdims=True))


def processed(logits: np.ndarray, sampling: Any) -> np.ndarray:
    """log mu over the vocabulary after temperature, min-p, top-k and top-p; -inf outside the support."""
    x = logits / sampling.temperature
    if sampling.min_p > 0:
        p = np.exp(log_softmax(x))
        x = np.where(p < sampling.min_p * p.max(-1, keepdims=True), -np.inf, x)
    if sampling.top_k > 0:
        least = np.sort(x, -1)[..., -sampling.top_k, None]
        x = np.where(x < least, -np.inf, x)
    if sampling.top_p < 1:
        x = cut_top_p(x, sampling.top_p)
    return log_softmax(x)


def cut_top_p(x: np.ndarray, top_p: float) -> np.ndarray:
    order = np.argsort(-x, -1)
    p = np.take_along_axis(np.exp(log_softmax(x)), order, -1)
    drop = np.cumsum(p, -1) - p >= top_p
    mask = np.zeros_like(drop)
    np.put_along_axis(mask, order, drop, -1)
    return np.where(mask, -np.inf, x)


@dataclass
class Step:
    """What one step leaves in the streams."""

    rollouts: list[Fields]
    report: ReportHeader
    statuses: list[SamplerStatus]
    manifests: list[tuple[int, int, str]]


@dataclass
class ToyRun:
    """One run. `fault` is planted from step `fault_from` on; see `FAULTS`."""

    seed: int
    config: RunConfig
    fault: str = ""
    fault_from: int = 0
    learning_rate: float = 2.0
    samplers: int = 2
    held: list[Rollout] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.theta = self.rng.normal(0, 1.2, (VOCABULARY, VOCABULARY))
        self.theta[:, EOS] += 0.5
        self.theta[:, BAD] = -9.0
        self.theta[BAD] = -9.0
        self.theta[BAD, BAD] = 3.0
        self.error = self.rng.normal(0, 0.01, self.theta.shape)
        self.theta_s = self.engine = self.old = self.theta.copy()
        self.version, self.published_at, self.measured = 0, 0, False
        self.probe: Probe | None = None

    def faulty(self, name: str, step: int) -> bool:
        return self.fault == name and step >= self.fault_from

    # -- the sampler -------------------------------------------------------------------------------------

    def distributions(self, step: int, sampler: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """[V, V] log-probs that are drawn from and that are reported, after each token."""
        logits = (self.engine if sampler == 0 else self.theta_s) + self.error
        drawn = processed(logits, self.config.sampling)
        reported = drawn
        if self.faulty("raw_logprobs", step):
            reported = log_softmax(logits)
        if self.faulty("top_p_without_support", step):
            drawn = reported = log_softmax(cut_top_p(logits / self.config.sampling.temperature, 0.9))
        if self.faulty("banned_token", step):
            x = logits / self.config.sampling.temperature
            x[:, EOS] = -np.inf
            drawn, reported = log_softmax(x), log_softmax(x)
        return drawn, reported

    def draw(self, first: np.ndarray, step: int, sampler: int = 0, longest: int = 0) -> list[Generation]:
        """Responses to one-token prompts [n], drawn side by side."""
        drawn, reported = self.distributions(step, sampler)
        longest = longest or self.config.sampling.max_new_tokens
        rows = [first]
        for _ in range(longest):
            noise = self.rng.gumbel(size=(first.size, VOCABULARY))
            rows.append((drawn[rows[-1]] + noise).argmax(-1))
        table = np.stack(rows, 1)
        ranked = np.argsort(-reported, -1)
        return [self._generation(row, reported, ranked) for row in table]

    def _generation(self, row: np.ndarray, reported: np.ndarray, ranked: np.ndarray) -> Generation:
        """One row of tokens as the engine returns it; `ranked` [V, V]: token ids by falling log-prob."""
        tokens = row[1:]
        ends = np.flatnonzero(tokens == EOS)
        count = int(ends[0]) + 1 if ends.size else tokens.size
        tokens, before = tokens[:count].astype(np.int32), row[:count]
        sampling = self.config.sampling
        # A sampler that hides its truncation reports heads as if there were none.
        truncated = sampling.truncated and self.fault not in ("raw_logprobs", "top_p_without_support")
        head = Head(sampling.head_tokens, sampling.head_eps, truncated, VOCABULARY)
        order = ranked[before, : head.requested].astype(np.int32)
        top = reported[before[:, None], order].astype(np.float32)
        offsets, ids, logp, whole = trim_heads(order, top, head)
        chosen = reported[before, tokens].astype(np.float32)
        return Generation(
            tokens,
            chosen,
            offsets,
            ids,
            logp,
            "stop" if ends.size else "length",
            ((0, count, self.version),),
            whole,
            draw_digest(tokens, chosen),
        )

    def publish_batch(self, step: int) -> list[Rollout]:
        """The rollouts of batch `step` in the order in which they finish: short ones first, mostly."""
        config, made = self.config, []
        for group in range(config.batch.prompts):
            prompt = np.full(config.batch.group_size, int(self.rng.integers(2, BAD)))
            sampler = group % self.samplers
            for index, g in enumerate(self.draw(prompt, step, sampler)):
                reward = float(GOOD in g.token_ids)
                header = RolloutHeader(
                    ticket_id=f"0.{self.version}.{step}.{group}.{index}",
                    epoch=0,
                    version=self.version,
                    batch=step,
                    group=group,
                    index=index,
                    item=group,
                    sampler=f"sampler-{sampler}",
                    finish_reason=g.finish_reason,
                    reward=reward,
                    spans=list(g.spans),
                    support_complete=g.support_complete,
                    digest=g.digest,
                )
                made.append(
                    Rollout(
                        header,
                        prompt[:1].astype(np.int32),
                        g.token_ids,
                        g.logp,
                        g.head_offsets,
                        g.head_ids,
                        g.head_logp,
                    )
                )
        finish = [r.response_ids.size + self.rng.exponential(3.0) for r in made]
        return [made[i] for i in np.argsort(finish)]

    # -- the trainer -------------------------------------------------------------------------------------

    def assemble(self, published: list[Rollout], step: int) -> list[Rollout]:
        """What is trained as batch `step`, in slot order."""
        batch = list(published)
        if self.faulty("reencoded_text", step):
            batch = [_reencoded(r) for r in batch]
        if self.faulty("reward_filter", step):
            kept = [r for r in batch if r.header.reward > 0]
            batch = (kept * 64)[: len(batch)] if kept else batch[:1]
        if self.faulty("silent_reward_filter", step):
            batch = [r for r in batch if r.header.reward > 0] or batch[:1]
        if self.faulty("first_finished", step):
            queue = self.held + batch
            batch, self.held = queue[: len(batch) // 2], queue[len(batch) // 2 :]
        return sorted(batch, key=lambda r: r.header.slot)

    def scores(self, theta: np.ndarray, batch: list[Rollout]) -> torch.Tensor:
        """[T] log pi of a batch's drawn tokens, over the reported support where that is complete."""
        before = np.concatenate([np.r_[r.prompt_ids[-1:], r.response_ids[:-1]] for r in batch])
        x = theta[before] / self.config.sampling.temperature
        inside = np.ones(x.shape, bool)
        start = 0
        for r in batch:
            rows = slice(start, start + r.response_ids.size)
            if r.header.support_complete:
                owner = np.repeat(np.arange(r.response_ids.size), np.diff(r.head_offsets))
                inside[rows] = False
                inside[rows][owner, r.head_ids] = True
            start = rows.stop
        drawn = np.concatenate([r.response_ids for r in batch])
        return torch.from_numpy(log_softmax(np.where(inside, x, -np.inf))[np.arange(before.size), drawn])

    def train(self, batch: list[Rollout], step: int) -> ReportHeader:
        """One update of theta, and the report of it."""
        sequence = torch.from_numpy(np.repeat(np.arange(len(batch)), [r.response_ids.size for r in batch]))
        mu = torch.from_numpy(np.concatenate([r.logp for r in batch])).double()
        pi, pi_s = self.scores(self.theta, batch), self.scores(self.theta_s, batch)
        mask = torch.ones_like(mu, dtype=torch.bool)
        metrics: dict[str, Any] = lag_metrics(
            pi, pi_s, mu, mask, sequence, torch.ones_like(mu), self.config.correction
        )
        fresh = step == self.published_at and self.version > 0
        if fresh and self.measured:
            metrics |= self.prefix_kl
            metrics |= self_prefix_metrics(
                mu, self.scores(self.old, batch), pi_s, sequence, [r.header.sampler for r in batch]
            )
        counts = Denominators(mu.numel(), len(batch), self.config.sampling.max_new_tokens)
        tokens = TokenBatch(pi, pi_s, mu, torch.ones_like(mu), mask, sequence, counts)
        metrics |= measure(StepData(step, step - self.published_at, tokens, batch))
        metrics |= trained_facts(batch, self.config.batch, step)
        lost = self.faulty("silent_reward_filter", step)
        metrics |= {
            "tokens": float(mu.numel()),
            "lag/age": float(step - self.published_at),
            "data/denominator_sequences": float(len(batch) if lost else self.config.batch.size),
            "data/denominator_tokens": float(mu.numel()),
        }
        self.update(batch, step)
        return ReportHeader(
            event="step", epoch=0, step=step, version=self.version, age=step + 1, metrics=metrics
        )

    def update(self, batch: list[Rollout], step: int) -> None:
        """A policy-gradient step with the batch's mean as baseline."""
        gradient = np.zeros_like(self.theta)
        mean = np.mean([r.header.reward for r in batch])
        table = np.exp(log_softmax(self.theta))
        for r in batch:
            before = np.concatenate([r.prompt_ids[-1:], r.response_ids[:-1]])
            p = table[before]
            advantage = r.header.reward - mean
            np.add.at(gradient, before, -advantage * p)
            np.add.at(gradient, (before, r.response_ids), advantage)
        self.theta = self.theta + self.learning_rate * gradient / len(batch)
        if self.faulty("collapse", step):
            self.theta[:, BAD] += 1.2

    def resync(self, step: int, last: list[Rollout]) -> None:
        """Publish theta; the sampler may fail to take all of it in."""
        sequence = torch.from_numpy(np.repeat(np.arange(len(last)), [r.response_ids.size for r in last]))
        old, new = self.scores(self.theta_s, last), self.scores(self.theta, last)
        self.measured = self.config.checks.self_prefix_responses > 0
        self.prefix_kl = {"kl/sampler_prefix": kl_estimate(old, new, sequence)[0]}
        self.old, self.theta_s = self.theta_s, self.theta.copy()
        self.version, self.published_at = self.version + 1, step + 1
        if self.faulty("label_moved", step):
            return
        taken = self.theta_s.copy()
        if self.faulty("stale_head", step):
            taken[:, ::2] = self.engine[:, ::2]
        self.engine = taken

    # -- the run -----------------------------------------------------------------------------------------

    def statuses(self, step: int) -> list[SamplerStatus]:
        if self.probe is None or self.probe.version != self.version:
            drawn = self.draw(np.full(192, 5), step, longest=1)
            self.probe = build_probe(drawn, request=0, version=self.version)
        lying = self.faulty("wrong_digest", step)
        return [
            SamplerStatus(
                sampler=f"sampler-{i}",
                heartbeat=0.0,
                epoch=0,
                version=self.version,
                digest=f"d{self.version - int(lying and i == 0)}",
                logprobs_mode="processed_logprobs",
                probe=self.probe if i == 0 else None,
            )
            for i in range(self.samplers)
        ]

    def steps(self, count: int) -> Iterator[Step]:
        """`count` steps, resyncs included."""
        manifests = [(0, 0, "d0")]
        for step in range(count):
            published = self.publish_batch(step)
            fields = [encode(r) for r in published]
            if self.faulty("nan_logprob", step):
                fields[3] = _with_nan(fields[3])
            statuses = self.statuses(step)
            batch = self.assemble(published, step)
            report = self.train(batch, step)
            yield Step(fields, report, statuses, manifests)
            manifests = []
            if (step + 1 - self.published_at) >= (self.config.sync.max_age or 10**9):
                self.resync(step, batch)
                manifests = [(0, self.version, f"d{self.version}")]


def _reencoded(rollout: Rollout) -> Rollout:
    """The pair (3, 4) is one token, 5, for a tokenizer; every 7 comes back as 8."""
    ids = np.where(rollout.response_ids == 7, 8, rollout.response_ids).astype(np.int32)
    return Rollout(
        rollout.header,
        rollout.prompt_ids,
        ids,
        rollout.logp,
        rollout.head_offsets,
        rollout.head_ids,
        rollout.head_logp,
    )


def _with_nan(fields: Fields) -> Fields:
    values = np.frombuffer(fields[b"a:logp"], dtype="<f4").copy()
    values[0] = np.nan
    return {**fields, b"a:logp": values.tobytes()}
