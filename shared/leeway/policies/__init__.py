"""The resync policy: after which optimiser steps the samplers get new weights.

base.py    what a rule is, and the facts it judges
rules/     the built-in rules, one module each
shelf.py   all rules by name, those of installed packages included; their settings
decide.py  `decide_resync`: the decision, a pure function that the controller and the trainer share

The first rule that asks for a resync gives the reason. Order: manual, ess, clip_fraction, age, every_n, then
every rule named under `sync.policies`, by `order` and name. A built-in rule without a settings model reads
the flat keys of the section `sync`, which also switch it off; any other rule is active only if the
configuration names it under `sync.policies`.
"""

from leeway.policies.base import Decision, Policy, PolicyError, SyncFacts, read_facts
from leeway.policies.decide import decide_resync
from leeway.policies.shelf import POLICIES, check_policies

__all__ = [
    "POLICIES",
    "Decision",
    "Policy",
    "PolicyError",
    "SyncFacts",
    "check_policies",
    "decide_resync",
    "read_facts",
]
