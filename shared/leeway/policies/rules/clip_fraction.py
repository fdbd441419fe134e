"""Resync when more than the share `sync.clip_fraction` of tokens is clipped by the lag ratio.

A clipped token has no gradient, so a run can stop learning while its ESS looks healthy
(docs/reproduction.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leeway.policies.base import Policy, SyncFacts

if TYPE_CHECKING:
    from leeway.config import SyncConfig


def wants_resync(facts: SyncFacts, sync: SyncConfig) -> bool:
    return sync.clip_fraction is not None and facts.clip_fraction > sync.clip_fraction


POLICY = Policy(wants_resync, order=20)
