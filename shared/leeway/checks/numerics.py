"""`numerics`: numbers are finite, ratios are bounded, and the engine's error does not jump."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from leeway.checks.facts import number
from leeway.checks.result import CheckResult, judge
from leeway.messages import ReportHeader
from leeway.metrics.areas.discrepancy import (
    DISC_ABS_MAX,
    DISC_ABS_MEAN,
    DISC_BEYOND_20,
    DISC_KL,
    DISC_KL_SAMPLER,
)
from leeway.metrics.areas.lag import LAG_ABS_MAX, LAG_AGE, LAG_BEYOND_20

LOG_RATIO_LIMIT, LOG_RATIO_WARN = 20.0, 10.0
"""Ratios are clamped at exp(20); exp(10) is beyond the rounding of any engine."""
HISTORY = 64
MIN_HISTORY = 3
JUMP_FAIL, JUMP_WARN = 10.0, 5.0
"""Multiples of the lower quartile of recent steps. One rare token can triple the mean of a small batch."""
SMALL_FAIL, SMALL_WARN = 1e-3, 5e-4
"""Nats; a jump from almost zero to less than this is rounding."""
LARGE_MEAN = 0.1
"""Mean |log pi_s - log mu| in nats; about 0.01 for bf16 engines, and up to this for 4-bit ones."""
STANDS_OUT = 4.0


class NonFinite:
    """Counts rejected numbers anywhere in the run: log-probs, weights, losses, whole rollouts."""

    def __init__(self) -> None:
        self.rejected = 0
        self._last = ""
        self._in_samplers: dict[str, int] = {}

    def add_rejected(self, text: str) -> None:
        """Record a message that could not be decoded, or an error that ended a process."""
        self.rejected, self._last = self.rejected + 1, text

    def add_sampler(self, sampler: str, count: int, error: str | None) -> None:
        """Record a sampler's own count of responses with invalid log-probabilities."""
        if count > self._in_samplers.get(sampler, 0):
            self.add_rejected(f"{sampler}: {error or f'{count} responses with invalid log-probs'}")
        self._in_samplers[sampler] = count

    def result(self) -> CheckResult:
        """`numerics/non_finite`."""
        text = f"rejected: {self._last}" if self.rejected else "nothing was rejected"
        return judge("numerics/non_finite", float(self.rejected), text, fail=0.0)


def check_log_ratio(report: ReportHeader) -> CheckResult:
    """`numerics/log_ratio`: the largest |log-ratio| of a step, of lag and discrepancy."""
    metrics = report.metrics
    lag, disc = number(metrics, LAG_ABS_MAX), number(metrics, DISC_ABS_MAX)
    count = number(metrics, LAG_BEYOND_20) + number(metrics, DISC_BEYOND_20)
    text = f"largest |log-ratio|: lag {lag:.2f}, discrepancy {disc:.2f}; {count:.0f} tokens beyond 20"
    return judge(
        "numerics/log_ratio",
        max(lag, disc),
        text,
        fail=LOG_RATIO_LIMIT,
        warn=LOG_RATIO_WARN,
        step=report.step,
        version=report.version,
    )


class Discrepancy:
    """KL(mu || pi_s) of each step against its own history; the evidence names the likely cause of a jump."""

    def __init__(self) -> None:
        self._history: deque[float] = deque(maxlen=HISTORY)

    def add(self, report: ReportHeader) -> CheckResult | None:
        """`numerics/discrepancy` after one more step."""
        metrics = report.metrics
        if DISC_KL not in metrics:
            return None
        by_sampler = {
            sampler: number(metrics, name)
            for name in metrics
            if (sampler := DISC_KL_SAMPLER.member(name)) is not None
        }
        kl = max([number(metrics, DISC_KL), *by_sampler.values()])
        usual = _lower_quartile(self._history) if len(self._history) >= MIN_HISTORY else None
        times = kl / max(usual, 1e-6) if usual is not None else 1.0
        # The two floors keep rounding from counting as a jump.
        value = times if kl > SMALL_FAIL else min(times, JUMP_FAIL) if kl > SMALL_WARN else 1.0
        mean = number(metrics, DISC_ABS_MEAN)
        shown = f"{kl:.2g} nats, {times:.1f} times the usual {usual:.2g}" if usual else f"{kl:.2g} nats"
        if value <= JUMP_FAIL:
            self._history.append(kl)
        if value > JUMP_WARN:
            shown += f"; likely cause: {name_cause(number(metrics, LAG_AGE), report.version, by_sampler)}"
        elif mean > LARGE_MEAN:
            value = JUMP_WARN + 1e-6
            shown += (
                f"; mean |log pi_s - log mu| is {mean:.2f}, more than an engine's rounding unless it is "
                "quantised"
            )
        return judge(
            "numerics/discrepancy",
            value,
            shown,
            fail=JUMP_FAIL,
            warn=JUMP_WARN,
            step=report.step,
            version=report.version,
        )


def _lower_quartile(values: Sequence[float]) -> float:
    # Not the median: a fault that grows with every resync must not become its own baseline.
    return sorted(values)[len(values) // 4]


def name_cause(age: float, version: int, by_sampler: Mapping[str, float]) -> str:
    """The most likely cause of a jump of the discrepancy."""
    if len(by_sampler) > 1:
        worst = max(by_sampler, key=lambda name: by_sampler[name])
        others = [value for name, value in by_sampler.items() if name != worst]
        if by_sampler[worst] > STANDS_OUT * max(statistics.median(others), 1e-6):
            return f"{worst} alone; its weights or its engine differ from the others; restart it"
    if age == 0:
        return (
            f"this is the first batch of version {version}, so part of the weights did not arrive (a tied "
            "head or a layer that kept its old kernel), or the resync did not take effect"
        )
    return (
        "the weights are those of the step before, so the engine changed: it restarted with another dtype, "
        "quantisation or sampling setting"
    )
