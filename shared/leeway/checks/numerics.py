"""`numerics`: numbers are finite, ratios are bounded, and the engine's error is what it has always been."""

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
"""exp(20) is where ratios are clamped; exp(10) is no rounding of any engine any more."""
HISTORY = 64
LEAST_HISTORY = 3
JUMP_FAIL, JUMP_WARN = 10.0, 5.0
"""Times the lower quartile of the last steps. One rare token may triple the mean of a small batch."""
SMALL_FAIL, SMALL_WARN = 1e-3, 5e-4
"""Nats; a jump from nearly nothing to less than this is rounding."""
LARGE_MEAN = 0.1
"""Mean |log pi_s - log mu| in nats; bf16 engines are near 0.01, 4-bit ones may come close."""
STANDS_OUT = 4.0


class NonFinite:
    """Counts of numbers that were refused somewhere: log-probs, weights, losses, whole rollouts."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._in_samplers: dict[str, int] = {}

    def add_refused(self, text: str) -> None:
        """A message that could not be decoded, or an error that ended a process."""
        self.refused.append(text)

    def add_sampler(self, sampler: str, count: int, error: str | None) -> None:
        """A sampler's own count of responses with invalid log-probabilities."""
        if count > self._in_samplers.get(sampler, 0):
            self.refused.append(f"{sampler}: {error or f'{count} responses with invalid log-probs'}")
        self._in_samplers[sampler] = count

    def result(self) -> CheckResult:
        """`numerics/non_finite`."""
        text = f"refused: {self.refused[-1]}" if self.refused else "nothing was refused"
        return judge("numerics/non_finite", float(len(self.refused)), text, fail=0.0)


def check_log_ratio(report: ReportHeader) -> CheckResult:
    """`numerics/log_ratio`: the largest |log-ratio| of a step, lag or discrepancy."""
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
    """KL(mu || pi_s) of each step against its own history; a jump names its likely cause."""

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
        usual = _lower_quartile(self._history) if len(self._history) >= LEAST_HISTORY else None
        times = kl / max(usual, 1e-6) if usual is not None else 1.0
        # A jump counts only above rounding, hence the two floors.
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
                f"; mean |log pi_s - log mu| is {mean:.2f}: more than an engine's rounding, unless it is "
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
    # Not the median: a fault that grows with every resync must not become its own usual.
    return sorted(values)[len(values) // 4]


def name_cause(age: float, version: int, by_sampler: Mapping[str, float]) -> str:
    """What a jump of the discrepancy most likely comes from."""
    if len(by_sampler) > 1:
        worst = max(by_sampler, key=lambda name: by_sampler[name])
        others = [value for name, value in by_sampler.items() if name != worst]
        if by_sampler[worst] > STANDS_OUT * max(statistics.median(others), 1e-6):
            return f"{worst} alone; its weights or its engine differ from the others', restart it"
    if age == 0:
        return (
            f"it is the first batch of version {version}, so part of the weights did not arrive (a tied head "
            "or a layer that kept its old kernel), or the resync did not take"
        )
    return (
        "the weights are those of the step before, so the engine changed: a restart with another dtype, "
        "quantisation or sampling setting"
    )
