"""Whether samplers get new weights after a step: the one decision that controller and trainer share.

The controller applies it to every step report; a trainer that gets no verdict in time applies it itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leeway.policies.base import Decision, PolicyError, SyncFacts
from leeway.policies.shelf import POLICIES, active_rules, rule_settings

if TYPE_CHECKING:
    from leeway.config import SyncConfig


def decide_resync(facts: SyncFacts, sync: SyncConfig) -> Decision:
    """The first active rule that asks for a resync gives the reason. Nothing is sent after the last batch.

    Raises PolicyError if a rule fails.
    """
    if facts.last:
        return Decision(None)
    for name in active_rules(sync):
        settings = rule_settings(name, sync)
        try:
            wanted = POLICIES[name].wants_resync(facts, settings)
        except Exception as exc:
            raise PolicyError(
                f"step {facts.step}: resync policy {name!r} failed: {type(exc).__name__}: {exc}"
            ) from exc
        if wanted:
            return Decision(name)
    return Decision(None)
