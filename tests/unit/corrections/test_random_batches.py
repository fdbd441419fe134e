"""Random batches of every shape against a reference that loops over tokens with plain floats.

Empty, masked and one-token responses, repeated and padded head ids, log-ratios of +-50, groups of one and
without variance: every gradient is finite and right.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from correction_support import correction
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.corrections import METHODS, Denominators, TokenBatch, advantages, surrogate_loss

pytestmark = pytest.mark.thorough

CONFIGS: list[dict[str, Any]] = [
    {"method": "dlc"},
    {"method": "dlc", "centering": "weighted", "lag_clip": "clamp"},
    {"method": "dlc", "centering": "plain", "lag_clip": "none"},
    {"method": "dlc", "centering": "none"},
    {"method": "none"},
    {"method": "is"},
    {"method": "tis", "score_centering": True},
    {"method": "icepop"},
    {"method": "mis", "inside": "one", "outside": "clamp"},
    {"method": "score_centering"},
    {"method": "ppo", "reference": "sync", "score_centering": True},
    {"method": "ppo", "reference": "mu"},
]


@st.composite
def batches(draw: st.DrawFn) -> TokenBatch:
    seed = draw(st.integers(0, 2**31 - 1))
    spread = draw(st.sampled_from([0.1, 1.0, 50.0]))
    group = draw(st.sampled_from([1, 2, 4]))
    groups = draw(st.integers(1, 3))
    width = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0, 5), min_size=group * groups, max_size=group * groups))
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def logs(*shape: int) -> torch.Tensor:
        return -spread * torch.rand(*shape, generator=g, dtype=torch.float64)

    rewards = torch.randint(0, 2, (groups, group), generator=g).double()
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ids = torch.randint(-1, 5, (n, width), generator=g)  # repeated, and -1 for padding
    head_mu = logs(n, width) - 1.5
    return TokenBatch(
        logp=logs(n).requires_grad_(),
        logp_sync=logs(n),
        logp_mu=logs(n),
        advantages=advantages(rewards, "grpo").flatten()[owner],
        mask=torch.rand(n, generator=g) < 0.8,
        seq_ids=owner,
        denominators=Denominators(max(n, 1), len(lengths), 5),
        head_logp_mu=torch.where(ids >= 0, head_mu, torch.tensor(-math.inf, dtype=torch.float64)),
        head_logp=(logs(n, width) - 1.5).requires_grad_(),
        head_logp_sync=logs(n, width) - 1.5,
        head_ids=ids,
        head_mask=ids >= 0,
        support_complete=torch.rand(n, generator=g) < 0.3,
    )


def weight(config: Any, r: float, advantage: float) -> float:
    match config.method:
        case "dlc" if config.lag_clip == "clamp":
            return min(max(r, config.clamp_low), config.clamp_high)
        case "dlc" if config.lag_clip == "none":
            return r
        case "dlc" | "ppo":
            if advantage >= 0:
                return r if r <= 1.2 else 0.0
            return r if 0.8 <= r <= 3 else 0.0
        case "none" | "score_centering":
            return 1.0
        case "is":
            return r
        case "tis":
            return min(r, 2.0)
        case _:
            if 0.5 <= r <= 5:
                return 1.0 if config.inside == "one" else r
            return 0.0 if config.outside == "drop" else min(max(r, 0.5), 5.0)


def exp_clamped(x: float) -> float:
    return math.exp(min(max(x, -20.0), 20.0))


def reference(b: TokenBatch, c: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the loss with respect to logp and head_logp."""
    of_logp, of_head = torch.zeros_like(b.logp), torch.zeros_like(b.head_logp)
    to_sync = c.method == "dlc" or (c.method == "ppo" and c.reference == "sync")
    kind = c.centering if c.method == "dlc" else "weighted"
    centred = kind != "none" if c.method == "dlc" else c.centre != "none"
    ref_a, ref_head = (b.logp_sync, b.head_logp_sync) if to_sync else (b.logp_mu, b.head_logp_mu)
    logp, logp_ref, advantage = b.logp.tolist(), ref_a.tolist(), b.advantages.tolist()
    ids, head_mask, complete = b.head_ids.tolist(), b.head_mask.tolist(), b.support_complete.tolist()
    head, head_at_ref, head_mu = b.head_logp.tolist(), ref_head.tolist(), b.head_logp_mu.tolist()
    for n in b.mask.nonzero()[:, 0].tolist():
        A = advantage[n]
        w = weight(c, exp_clamped(logp[n] - logp_ref[n]), A)
        scale = -A / b.denominators.tokens
        of_logp[n] += scale * w
        if not centred:
            continue
        places = [k for k in range(len(ids[n])) if head_mask[n][k] and ids[n][k] not in ids[n][:k]]
        mu, pi, ref = ({k: math.exp(x[n][k]) for k in places} for x in (head_mu, head, head_at_ref))
        left = [max(1 - sum(x.values()), 1e-6) for x in (pi, mu, ref)]
        rho_mu, rho_ref = left[1] / left[0], left[2] / left[0]
        w_tail = weight(c, 1 / rho_ref, A)
        alpha = {"discrepancy": (rho_mu - rho_ref) * w_tail, "weighted": rho_mu * w_tail}.get(
            kind, w * rho_mu
        )
        for k in places:
            w_k = weight(c, exp_clamped(head[n][k] - head_at_ref[n][k]), A)
            on_head = {"discrepancy": (mu[k] - ref[k]) * w_k, "weighted": mu[k] * w_k}.get(kind, w * mu[k])
            tail = 0.0 if complete[n] else alpha * pi[k]
            of_head[n, k] -= scale * (on_head - tail)
    return of_logp, of_head


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c.values())))
@given(b=batches())
@settings(max_examples=40, deadline=None)
def test_gradients_are_those_of_the_loop(b: TokenBatch, config: dict[str, Any]) -> None:
    c = correction(**config, aggregation="token-mean")
    loss, metrics = surrogate_loss(b, c)
    got = torch.autograd.grad(loss, [b.logp, b.head_logp], allow_unused=True)
    for found, want in zip(got, reference(b, c), strict=True):
        found = torch.zeros_like(want) if found is None else found
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)
    assert all(math.isfinite(float(v)) for v in metrics.values())


@pytest.mark.parametrize("method", METHODS)
@given(b=batches())
@settings(max_examples=15, deadline=None)
def test_every_gradient_is_finite_and_zero_where_nothing_is_trained(b: TokenBatch, method: str) -> None:
    for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"):
        loss, metrics = surrogate_loss(b, correction(method, aggregation=aggregation))
        (grad,) = torch.autograd.grad(loss, b.logp, retain_graph=True)
        assert torch.isfinite(grad).all()
        assert (grad[~b.mask] == 0).all()
        assert (grad[b.advantages == 0] == 0).all()
        assert all(math.isfinite(float(v)) for v in metrics.values())
