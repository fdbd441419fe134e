"""Resync because a person asked for one: `leeway resync`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leeway.policies.base import Policy, SyncFacts

if TYPE_CHECKING:
    from leeway.config import SyncConfig


def wants_resync(facts: SyncFacts, sync: SyncConfig) -> bool:
    return facts.manual


POLICY = Policy(wants_resync, order=0)
