"""Resync when the effective sample size of the lag ratio falls below `sync.ess_threshold`.

ESS = (sum w)^2 / (n sum w^2) over the raw lag ratios w of a batch, per token or per sequence
(`sync.ess_level`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leeway.policies.base import Policy, SyncFacts

if TYPE_CHECKING:
    from leeway.config import SyncConfig


def wants_resync(facts: SyncFacts, sync: SyncConfig) -> bool:
    ess = facts.ess_token if sync.ess_level == "token" else facts.ess_sequence
    return sync.ess_threshold is not None and ess < sync.ess_threshold


POLICY = Policy(wants_resync, order=10)
