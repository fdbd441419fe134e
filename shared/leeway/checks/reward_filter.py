"""`reward_filter`: every requested response is trained and counted, regardless of its reward."""

from __future__ import annotations

from collections import Counter

from leeway.checks.facts import Ledger, Trained
from leeway.checks.result import CheckResult, judge
from leeway.config import BatchConfig

REWARD_TOLERANCE = 1e-6
"""Difference between means of the same numbers in another order."""


def check_groups(trained: Trained, ledger: Ledger, epoch: int, config: BatchConfig) -> CheckResult:
    """`reward_filter/groups`: requested against trained responses of each group."""
    published = ledger.batch(epoch, trained.version, trained.step)
    by_group = Counter(slot.group for slot in trained.missing)
    lost = float(trained.missing_count + trained.duplicates)
    text = f"{trained.responses} of {config.size} requested responses trained, {config.group_size} per group"
    if lost:
        short = ", ".join(
            f"group {group}: {config.group_size - count} of {config.group_size}"
            for group, count in sorted(by_group.items())[:6]
        )
        text = f"{trained.missing_count} of {config.size} requested responses were not trained ({short})"
        dropped = [published[slot].reward for slot in trained.missing if slot in published]
        if dropped:
            text += (
                f"; {len(dropped)} of them were published, with mean reward {sum(dropped) / len(dropped):.3f}"
                f" against {trained.reward_mean:.3f} of the trained responses"
            )
        if trained.duplicates:
            text += f"; {trained.duplicates} responses are duplicated in the batch"
    return judge("reward_filter/groups", lost, text, fail=0.0, step=trained.step, version=trained.version)


def check_rewards(trained: Trained, ledger: Ledger, epoch: int, config: BatchConfig) -> CheckResult | None:
    """`reward_filter/rewards`: mean reward of the responses published for a batch against those trained."""
    published = ledger.batch(epoch, trained.version, trained.step)
    if len(published) < config.size:
        return None
    mean = sum(p.reward for p in published.values()) / len(published)
    text = f"mean reward published {mean:.4f}, trained {trained.reward_mean:.4f}"
    if ledger.conflicting(epoch, trained.version, trained.step):
        return None  # the trainer decides which of two responses counts
    off = abs(mean - trained.reward_mean)
    return judge(
        "reward_filter/rewards",
        off,
        text,
        fail=REWARD_TOLERANCE,
        step=trained.step,
        version=trained.version,
    )


def check_denominators(trained: Trained, config: BatchConfig) -> CheckResult | None:
    """`reward_filter/denominators`: the loss is divided by the requested responses and all their tokens."""
    if not trained.denominator_sequences:
        return None
    off = abs(trained.denominator_sequences - config.size) + abs(trained.denominator_tokens - trained.tokens)
    text = (
        f"divided by {trained.denominator_sequences} responses ({config.size} requested) and "
        f"{trained.denominator_tokens} tokens ({trained.tokens} trained)"
    )
    return judge("reward_filter/denominators", float(off), text, fail=0.0, step=trained.step)
