"""`deferral`: no response is trained later because it is long, slow or bad.

A batch contains exactly the planned responses. Taking whatever finishes first would leave long responses to
later batches, where they are older. `outstanding` counts tickets without an answer when their batch is
trained, `lengths` compares the lengths of published and trained responses, `selection` tests whether being
trained depends on length, reward or finish order, and `age` whether older rollouts are longer or better.
"""

from __future__ import annotations

from collections import deque

from leeway.checks.facts import Ledger, Trained, length_histogram
from leeway.checks.result import CheckResult, judge
from leeway.checks.stats import correlation, correlation_z
from leeway.config import BatchConfig

LENGTH_LIMIT = 0.01
"""Share of responses in different length classes; exactly 0 in a clean run."""
Z_FAIL, Z_WARN = 6.0, 5.0
"""Two-sided 2e-9 and 6e-7 when there is no correlation."""
MIN_DOF = 12
WINDOW = 128


def check_outstanding(
    trained: Trained, ledger: Ledger, epoch: int, config: BatchConfig
) -> CheckResult | None:
    """`deferral/outstanding`: requested responses that are neither trained nor published yet."""
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
        text += f"; {trained.foreign} responses of other batches were trained instead"
    value = float(len(late) + trained.foreign)
    return judge("deferral/outstanding", value, text, fail=0.0, step=trained.step, version=trained.version)


def check_lengths(trained: Trained, ledger: Ledger, epoch: int, config: BatchConfig) -> CheckResult | None:
    """`deferral/lengths`: length classes of the responses published for a batch against those trained."""
    published = ledger.batch(epoch, trained.version, trained.step)
    if len(published) < config.size and not trained.missing_count:
        return None  # some were deleted before this reader saw them
    dispatched = length_histogram(p.tokens for p in published.values())
    size = max(len(dispatched), len(trained.lengths))
    a, b = (list(h) + [0] * (size - len(h)) for h in (dispatched, trained.lengths))
    distance = sum(abs(x - y) for x, y in zip(a, b, strict=True)) / (2 * config.size)
    text = f"responses of 1, 2, 3-4, 5-8, ... tokens: published {a}, trained {b}"
    return judge(
        "deferral/lengths", distance, text, fail=LENGTH_LIMIT, step=trained.step, version=trained.version
    )


class Selection:
    """Tests whether being trained depends on a response's length, reward or finish order."""

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
        value = abs(correlation_z(found[worst], dof)) if dof >= MIN_DOF else 0.0
        text = (
            f"{sum(kept):.0f} of {len(kept)} published responses were trained; correlation with {worst} "
            f"{found[worst]:+.2f}; correlation of finish order with length "
            f"{correlation(order, tokens):+.2f}, with reward {correlation(order, reward):+.2f}"
        )
        return judge("deferral/selection", value, text, fail=Z_FAIL, warn=Z_WARN, step=trained.step)


class AgeCorrelation:
    """Tests whether batches trained late under a version have longer or better responses.

    All batches of a version are drawn from the same policy, so there is no such correlation in a clean run.
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[int, float, float, float]] = deque(maxlen=WINDOW)

    def add(self, trained: Trained) -> CheckResult | None:
        """`deferral/age` after one more batch."""
        self._rows.append((trained.version, trained.age, trained.length_mean, trained.reward_mean))
        versions = sorted({row[0] for row in self._rows})
        dof = len(self._rows) - len(versions) - 3
        if dof < MIN_DOF:
            return None
        ages, lengths, rewards = (self._within(versions, column) for column in (1, 2, 3))
        found = {"length": correlation(ages, lengths), "reward": correlation(ages, rewards)}
        worst = max(found, key=lambda name: abs(found[name]))
        value = abs(correlation_z(found[worst], dof))
        text = (
            f"over {len(ages)} batches, within their versions: correlation of age with length "
            f"{found['length']:+.2f}, with reward {found['reward']:+.2f}"
        )
        return judge("deferral/age", value, text, fail=Z_FAIL, warn=Z_WARN, step=trained.step)

    def _within(self, versions: list[int], column: int) -> list[float]:
        # Deviations from the mean of the version.
        result: list[float] = []
        for version in versions:
            values = [row[column] for row in self._rows if row[0] == version]
            result += [value - sum(values) / len(values) for value in values]
        return result
