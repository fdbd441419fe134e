"""Resync when the samplers' weights are `sync.max_age` optimiser steps old."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leeway.policies.base import Policy, SyncFacts

if TYPE_CHECKING:
    from leeway.config import SyncConfig


def wants_resync(facts: SyncFacts, sync: SyncConfig) -> bool:
    return sync.max_age is not None and facts.age >= sync.max_age


POLICY = Policy(wants_resync, order=30)
