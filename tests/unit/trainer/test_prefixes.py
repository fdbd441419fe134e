"""What is measured around a resync, on policies that are known exactly."""

from __future__ import annotations

import math

import pytest
import torch

from leeway_trainer.prefixes import kl_estimate, missing_share, self_prefix_metrics

TOKENS, RESPONSES = 4000, 200


def drawn(seed: int, lag: float = 0.2, rounding: float = 0.02) -> tuple[torch.Tensor, ...]:
    """(log mu without rounding = log pi_new, log pi_old, rounding, response), tokens drawn from pi_new."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, 16, generator=generator, dtype=torch.float64)
    moved = logits + lag * torch.randn(TOKENS, 16, generator=generator, dtype=torch.float64)
    new, old = logits.log_softmax(1), moved.log_softmax(1)
    tokens = torch.multinomial(new.exp(), 1, generator=generator)
    noise = rounding * torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    sequence = torch.arange(TOKENS) // (TOKENS // RESPONSES)
    exact = (new.exp() * (new - old)).sum(1).mean()
    return new.gather(1, tokens)[:, 0], old.gather(1, tokens)[:, 0], noise, sequence, exact


def test_kl_estimate_is_the_kl_within_its_error() -> None:
    new, old, _, sequence, exact = drawn(0)
    kl, error = kl_estimate(new, old, sequence)
    assert 0 < error < 0.1 * kl
    assert kl == pytest.approx(float(exact), abs=4 * error)
    assert kl_estimate(new, new, sequence) == (0.0, 0.0)


@pytest.mark.parametrize("arrived", [0.0, 0.5, 1.0])
def test_the_missing_share_is_what_did_not_arrive(arrived: float) -> None:
    new, old, noise, sequence, _ = drawn(1)
    mu = arrived * new + (1 - arrived) * old + noise
    share, error = missing_share(mu, old, new, sequence)
    assert share == pytest.approx(1 - arrived, abs=5 * error)
    assert error < 0.02


def test_nothing_is_said_when_the_update_did_nothing() -> None:
    new, _, noise, sequence, _ = drawn(2)
    assert missing_share(new + noise, new, new, sequence) == (0.0, math.inf)
    metrics = self_prefix_metrics(new + noise, new, new, sequence, ["a"] * RESPONSES)
    assert "resync/missing" not in metrics


def test_one_sampler_that_kept_its_weights_does_not_hide_among_others() -> None:
    new, old, noise, sequence, _ = drawn(3)
    stale = sequence % 8 == 5
    mu = torch.where(stale, old, new) + noise
    samplers = [f"sampler-{i % 8}" for i in range(RESPONSES)]
    metrics = self_prefix_metrics(mu, old, new, sequence, samplers)
    assert metrics["resync/sampler"] == "sampler-5"
    assert float(metrics["resync/missing"]) == pytest.approx(1, abs=0.1)
