"""`deferral`: no response is put off because it is long, slow or bad.

A batch is what was planned. Taking whatever finished first leaves long responses to later batches, where they
are older: `outstanding` counts tickets that were passed over, `lengths` compares what was dispatched with
what was trained, `selection` asks whether being trained depended on length, reward or finish order, and
`age` whether old rollouts are longer or better than new ones.
"""

from __future__ import annotations

from collections import deque

from leeway.checks.facts import Ledger, Trained, length_histogram
from leeway.checks.result import CheckResult, judge
from leeway.checks.stats import correlation, correlation_z
from leeway.config import BatchConfig

LENGTH_LIMIT = 0.01
"""Share of responses in other length classes; a clean run has exactly 0."""
Z_FAIL, Z_WARN = 6.0, 5.0
"""Two-sided 2e-9 and 6e-7 for a correlation that is not there."""
LEAST_DOF = 12
WINDOW = 128


def check_outstanding(
    trained: Trained, ledger: Ledger, epoch: int, config: BatchConfig
) -> CheckResult | None:
    """`deferral/outstanding`: requested responses that were neither trained nor published yet."""
    published = ledger.batch(epoch, trained.version, trained.step)
    late = [slot for slot in trained.missing if slot not in published]
    text = f"batch {trained.step} was trained with all of its {config.size} tickets answered"
    if late:
        named = ", ".join(f"{s.group}/{s.index}" for s in late[:8])
        text = (
            f"batch {trained.step} was trained while {len(late)} of its {config.size} tickets were "
            f"outstanding: {named} (group/index)"
        )
    if trained.foreign:
        text += f"; {trained.foreign} responses of other batches took their place"
    value = float(len(late) + trained.foreign)
    return judge("deferral/outstanding", value, text, fail=0.0, step=trained.step, version=trained.version)


def check_lengths(trained: Trained, ledger: Ledger, epoch: int, config: BatchConfig) -> CheckResult | None:
    """`deferral/lengths`: length classes of what was dispatched for a batch against what was trained."""
    published = ledger.batch(epoch, trained.version, trained.step)
    if len(published) < config.size and not trained.missing_count:
        return None  # this witness came too late for some of them
    dispatched = length_histogram(p.tokens for p in published.values())
    size = max(len(dispatched), len(trained.lengths))
    a, b = (list(h) + [0] * (size - len(h)) for h in (dispatched, trained.lengths))
    distance = sum(abs(x - y) for x, y in zip(a, b, strict=True)) / (2 * config.size)
    text = f"responses of 1, 2, 3-4, 5-8, ... tokens: published {a}, trained {b}"
    return judge(
        "deferral/lengths", distance, text, fail=LENGTH_LIMIT, step=trained.step, version=trained.version
    )


class Selection:
    """Whether a published response's length, reward or place in the order decided if it was trained."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW * 64)

    def add(self, trained: Trained, ledger: Ledger, epoch: int, config: BatchConfig) -> CheckResult | None:
        """`deferral/selection` after one more batch."""
        published = ledger.batch(epoch, trained.version, trained.step)
        missing = set(trained.missing)
        ranked = sorted(published.values(), key=lambda p: p.order)
        for rank, rollout in enumerate(ranked):
            trained_now = 0.0 if rollout.slot in missing else 1.0
            self._rows.append((trained_now, rollout.tokens, rollout.reward, rank / config.size))
        if not self._rows:
            return None
        kept, tokens, reward, order = (list(column) for column in zip(*self._rows, strict=True))
        found = {
            name: correlation(kept, column)
            for name, column in (("length", tokens), ("reward", reward), ("finish order", order))
        }
        worst = max(found, key=lambda name: abs(found[name]))
        dof = len(kept) - 3
        value = abs(correlation_z(found[worst], dof)) if dof >= LEAST_DOF else 0.0
        text = (
            f"{sum(kept):.0f} of {len(kept)} published responses were trained, correlation with {worst} "
            f"{found[worst]:+.2f}; finish order goes with length {correlation(order, tokens):+.2f}, with "
            f"reward {correlation(order, reward):+.2f}"
        )
        return judge("deferral/selection", value, text, fail=Z_FAIL, warn=Z_WARN, step=trained.step)


class AgeCorrelation:
    """Whether batches that are trained late under a version hold longer or better responses.

    Under one version every batch is drawn from the same policy, so within a version there is no reason.
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[int, float, float, float]] = deque(maxlen=WINDOW)

    def add(self, trained: Trained) -> CheckResult | None:
        """`deferral/age` after one more batch."""
        self._rows.append((trained.version, trained.age, trained.length_mean, trained.reward_mean))
        versions = sorted({row[0] for row in self._rows})
        dof = len(self._rows) - len(versions) - 3
        if dof < LEAST_DOF:
            return None
        ages, lengths, rewards = (self._within(versions, column) for column in (1, 2, 3))
        found = {"length": correlation(ages, lengths), "reward": correlation(ages, rewards)}
        worst = max(found, key=lambda name: abs(found[name]))
        value = abs(correlation_z(found[worst], dof))
        text = (
            f"over {len(ages)} batches, within their versions: age goes with length {found['length']:+.2f}, "
            f"with reward {found['reward']:+.2f}"
        )
        return judge("deferral/age", value, text, fail=Z_FAIL, warn=Z_WARN, step=trained.step)

    def _within(self, versions: list[int], column: int) -> list[float]:
        # Differences to the mean of the version.
        result: list[float] = []
        for version in versions:
            values = [row[column] for row in self._rows if row[0] == version]
            result += [value - sum(values) / len(values) for value in values]
        return result
