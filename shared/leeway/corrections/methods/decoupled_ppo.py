"""Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298), and A-3PO (arXiv 2512.06547).

w grad min(r A, clip(r) A),   w = pi_prox/mu,   r = pi_theta/pi_prox
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from leeway.corrections.registry import Method
from leeway.corrections.settings import Proximal

if TYPE_CHECKING:
    from leeway.corrections.batch import TokenBatch
    from leeway.corrections.weighted import PerToken


class DecoupledPpoConfig(Proximal):
    """Decoupled PPO: PPO's clip of the ratio to a proximal policy, weighted by prox/mu."""

    method: Literal["decoupled_ppo"] = "decoupled_ppo"


def loss(batch: TokenBatch, config: DecoupledPpoConfig) -> PerToken:
    from leeway.corrections.decoupled import decoupled_weight
    from leeway.corrections.weighted import weight_metrics

    w, free = decoupled_weight(batch, config)
    return -batch.advantages.detach() * w * batch.logp, weight_metrics(w, free, batch.mask)


METHOD = Method(
    settings=DecoupledPpoConfig,
    formula="w grad min(r A, clip(r) A), w = pi_prox/mu, r = pi_theta/pi_prox",
    needs=("logp_mu", "logp_prox"),
    source="arXiv 2505.24298; A-3PO 2512.06547",
    loss=loss,
)
