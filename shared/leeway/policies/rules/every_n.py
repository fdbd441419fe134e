"""Resync after every `sync.every_n`-th step, whatever is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leeway.policies.base import Policy, SyncFacts

if TYPE_CHECKING:
    from leeway.config import SyncConfig


def wants_resync(facts: SyncFacts, sync: SyncConfig) -> bool:
    return sync.every_n is not None and (facts.step + 1) % sync.every_n == 0


POLICY = Policy(wants_resync, order=40)
