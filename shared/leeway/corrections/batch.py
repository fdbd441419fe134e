"""The typed batch that corrections work on, and its denominators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominators:
    """Counts of the GLOBAL batch (all ranks, all micro-batches), as requested; never of what was kept."""

    tokens: int
    """Response tokens."""
    sequences: int
    """Requested responses."""
    max_tokens: int
    """Longest response that was allowed."""


@dataclass(frozen=True)
class TokenBatch:
    """N response tokens (a micro-batch, or all of them). Log-probabilities in nats.

    The head gives mu, pi_theta and pi_s at K token ids per position, padded where `head_mask` is false.
    All are normalised over the full vocabulary (or, with `support_complete`, over the reported support).
    With `head_ids` None and K = V the head is the whole vocabulary.
    """

    logp: Tensor
    """[N] log pi_theta(a|h), with gradient."""
    logp_sync: Tensor
    """[N] log pi_s(a|h): the trainer on the sampler's weights, no gradient."""
    logp_mu: Tensor
    """[N] log mu(a|h) as reported by the sampler."""
    advantages: Tensor
    """[N] advantage of the token's response."""
    mask: Tensor
    """[N] bool: token is trained."""
    seq_ids: Tensor
    """[N] int64: which response a token belongs to; a response never spans two TokenBatches."""
    denominators: Denominators
    head_logp_mu: Tensor | None = None
    """[N, K]"""
    head_logp: Tensor | None = None
    """[N, K], with gradient."""
    head_logp_sync: Tensor | None = None
    """[N, K]"""
    head_ids: Tensor | None = None
    """[N, K] int64"""
    head_mask: Tensor | None = None
    """[N, K] bool; None: no padding."""
    support_complete: Tensor | None = None
    """[N] bool: the head is all that could be drawn, there is no tail."""
    tail_logp: Tensor | None = None
    """[N] sum over v off the head of sg(pi_s(v) f(pi_theta(v)/pi_ref(v))) log pi_theta(v), with gradient
    (primitives.tail_surrogate), pi_ref modelled there as a multiple of pi_s; None: the tail follows
    pi_theta."""
    logp_prox: Tensor | None = None
    """[N] log pi_prox(a|h), the policy at the start of the update; None: the current one."""
    age: Tensor | None = None
    """[N] optimiser steps between the weights that drew the token and the current ones; None: 0."""
    prepared: Mapping[str, float] | None = None
    """What the method's `prepare` found on the global batch; None: this is the global batch."""

    def prox(self) -> Tensor:
        """[N] log pi_prox(a|h), no gradient."""
        return (self.logp if self.logp_prox is None else self.logp_prox).detach()

    def has_head(self) -> bool:
        """True when the batch carries everything that centring needs."""
        # Not `None in (...)`: comparing a tensor with None takes milliseconds.
        return all(x is not None for x in (self.head_logp_mu, self.head_logp, self.head_logp_sync))

    def without_untrained(self) -> TokenBatch:
        """The batch with every number outside `mask` set to 0: those may be anything."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and value.is_floating_point():
                mask = self.mask if value.dim() == 1 else self.mask[:, None]
                changed[field.name] = torch.where(mask, value, torch.zeros_like(value))
        return replace(self, **changed)

    def seq_lengths(self) -> Tensor:
        """[N] number of trained tokens of each token's own response."""
        _, inverse = torch.unique(self.seq_ids, return_inverse=True)
        counts = torch.zeros(int(inverse.max()) + 1 if inverse.numel() else 0, dtype=torch.long)
        counts = counts.to(self.mask.device).index_add(0, inverse, self.mask.long())
        return counts[inverse]
