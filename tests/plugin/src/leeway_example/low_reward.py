"""Resync while the mean reward of a batch is low: the weights that drew it are not worth keeping."""

from __future__ import annotations

from leeway.config import Section
from leeway.policies import Policy, SyncFacts


class LowRewardConfig(Section):
    """The section `sync.policies.low_reward`."""

    below: float
    """Resync after a batch whose mean reward is below this."""


def wants_resync(facts: SyncFacts, config: LowRewardConfig) -> bool:
    """A pure function: controller and trainer call it on the same facts and must agree."""
    return facts.metrics["reward/mean"] < config.below


POLICY = Policy(wants_resync, settings=LowRewardConfig)
