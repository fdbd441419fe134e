"""Decoupled PPO's proximal policy and weight, which `m2po` uses as well."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leeway.corrections.batch import TokenBatch
from leeway.corrections.clips import f_ppo
from leeway.corrections.primitives import ratio
from leeway.corrections.settings import Proximal


def loglinear_prox(batch: TokenBatch) -> Tensor:
    """[N] A-3PO's proximal policy (arXiv 2512.06547): log mu + alpha log(pi_theta/mu), alpha = (d-1)/d.

    d is the token's age in optimiser steps; alpha is 0 where d <= 0.
    """
    age = torch.zeros_like(batch.logp) if batch.age is None else batch.age.to(batch.logp.dtype)
    alpha = torch.where(age > 0, (age - 1) / age.clamp_min(1), torch.zeros_like(age))
    return batch.logp_mu + alpha * (batch.logp.detach() - batch.logp_mu)


def proximal(batch: TokenBatch, config: Proximal) -> Tensor:
    """[N] log pi_prox according to `prox_logp_method`."""
    return batch.prox() if config.prox_logp_method == "recompute" else loglinear_prox(batch)


def decoupled_weight(batch: TokenBatch, config: Proximal) -> tuple[Tensor, Tensor]:
    """[N] weight of decoupled PPO, and the same without any clipping.

    w = pi_prox/mu, r = pi_theta/pi_prox. Tokens with w above behave_weight_cap are dropped; denominators keep
    counting them.
    """
    prox = proximal(batch, config)
    behave, r = ratio(prox, batch.logp_mu), ratio(batch.logp, prox)
    w = behave * f_ppo(config.clip_low, config.clip_high, math.inf)(r, batch.advantages.detach())
    if config.behave_weight_cap is not None:
        w = torch.where(behave <= config.behave_weight_cap, w, torch.zeros_like(w))
    return w, behave * r
