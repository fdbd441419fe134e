"""Explicit softmax policies at one prefix, float64: what the tests of corrections compute with."""

from __future__ import annotations

import torch

from leeway.config import CorrectionConfig, build_correction
from leeway.corrections import Denominators, TokenBatch, surrogate_loss

V = 12
"""Tokens in the vocabulary."""


def correction(method: str, **values: object) -> CorrectionConfig:
    """Settings of a method."""
    return build_correction({"method": method, **values})


class Prefix:
    """One prefix: logits of pi_theta (with gradient), pi_s and mu over V tokens."""

    def __init__(self, seed: int, lag: float = 0.5, discrepancy: float = 0.3, size: int = V) -> None:
        g = torch.Generator().manual_seed(seed)
        base = torch.randn(size, generator=g, dtype=torch.float64)
        sync = base + lag * torch.randn(size, generator=g, dtype=torch.float64)
        mu = sync + discrepancy * torch.randn(size, generator=g, dtype=torch.float64)
        self.logits = base.clone().requires_grad_()
        self.log_pi = torch.log_softmax(self.logits, 0)
        self.log_s = torch.log_softmax(sync, 0)
        self.log_mu = torch.log_softmax(mu, 0)

    def score(self, v: int) -> torch.Tensor:
        """grad log pi_theta(v) with respect to the logits: e_v - pi."""
        return torch.nn.functional.one_hot(torch.tensor(v), len(self.logits)).double() - self.log_pi.exp()

    def mean_score(self, weights: torch.Tensor) -> torch.Tensor:
        """sum_v weights(v) s(v)."""
        scores = torch.eye(len(self.logits), dtype=torch.float64) - self.log_pi.exp()  # a row for each v
        return weights @ scores

    def batch(self, a: int, advantage: float, head: torch.Tensor | None = None) -> TokenBatch:
        """A batch of the one token `a`; `head`: ids, None: the full vocabulary."""
        ids = torch.arange(len(self.logits)) if head is None else head
        pick = ids.clamp_min(0)
        return TokenBatch(
            logp=self.log_pi[a][None],
            logp_sync=self.log_s[a][None],
            logp_mu=self.log_mu[a][None],
            advantages=torch.tensor([advantage], dtype=torch.float64),
            mask=torch.tensor([True]),
            seq_ids=torch.tensor([0]),
            denominators=Denominators(1, 1, 1),
            head_logp_mu=self.log_mu[pick][None],
            head_logp=self.log_pi[pick][None],
            head_logp_sync=self.log_s[pick][None],
            head_ids=None if head is None else ids[None],
            head_mask=None if head is None else (ids >= 0)[None],
        )

    def gradient(self, method: str, batch: TokenBatch, **config: object) -> torch.Tensor:
        """Ascent direction: minus the gradient of the loss."""
        loss, _ = surrogate_loss(batch, correction(method, **config))
        (grad,) = torch.autograd.grad(loss, self.logits, retain_graph=True)
        return -grad.detach()
