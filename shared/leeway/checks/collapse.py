"""`collapse`: signs that the policy has left the region where it earned its rewards.

KL on the sampler's prefixes averages over states that the old policy visits and misses a bad region that only
the new one visits. The first fresh batch after a resync is therefore scored under the old weights as well.
"""

from __future__ import annotations

import math
from collections import deque

from leeway.checks.facts import number
from leeway.checks.result import CheckResult, judge
from leeway.messages import ReportHeader
from leeway.metrics.areas.response import (
    RESPONSE_ENTROPY,
    RESPONSE_LENGTH_MEAN,
    RESPONSE_REPETITION,
    RESPONSE_TRUNCATED_FRACTION,
)
from leeway.metrics.areas.resync import KL_SAMPLER_PREFIX, KL_SELF_PREFIX, KL_SELF_PREFIX_SE
from leeway.metrics.areas.reward import REWARD_MEAN, REWARD_STD

SELF_TIMES_FAIL, SELF_TIMES_WARN = 10.0, 4.0
"""Self-prefix KL over sampler-prefix KL; both are s^2/2 for a small step, so the ratio is about 1."""
SELF_MIN = 0.01
"""Nats per token; below this nothing has collapsed, whatever the ratio."""
PATIENCE = 10
"""Consecutive steps (the rule of the score-centring authors)."""
HALF = 0.5
PEAK_Z = 4.0
"""Standard errors by which rewards must have fallen, so that a lucky small batch is not taken for a peak."""
REPEATED_FAIL, REPEATED_TIMES = 0.5, 3.0
LONG_FAIL, LONG_START = 0.95, 0.5
SHORT_TIMES = 0.1
ENTROPY_TIMES = 3.0
START = 5
"""Number of first steps that later steps are compared with."""


def check_self_prefix(report: ReportHeader) -> CheckResult | None:
    """`collapse/self_prefix_kl`, for the first fresh batch after a resync that the trainer measured."""
    metrics = report.metrics
    if KL_SELF_PREFIX not in metrics:
        return None
    own, error = number(metrics, KL_SELF_PREFIX), number(metrics, KL_SELF_PREFIX_SE)
    theirs = number(metrics, KL_SAMPLER_PREFIX)
    # The lower end of the estimate must be large, so that a few tokens alone do not raise an alarm.
    clear = own - 2 * error > SELF_MIN
    value = own / max(theirs, 1e-4) if clear else min(own / max(theirs, 1e-4), SELF_TIMES_WARN)
    text = (
        f"KL(new || old) {own:.3g} ± {error:.2g} nats per token on the new policy's own prefixes, "
        f"{theirs:.3g} on the sampler's"
    )
    return judge(
        "collapse/self_prefix_kl",
        value,
        text,
        fail=SELF_TIMES_FAIL,
        warn=SELF_TIMES_WARN,
        step=report.step,
        version=report.version,
    )


class RewardCollapse:
    """Reward below half of its running peak for PATIENCE steps; a peak is a mean over as many steps."""

    def __init__(self) -> None:
        self._window: deque[tuple[float, float]] = deque(maxlen=PATIENCE)
        self._peak, self._peak_var = -math.inf, 0.0

    def add(self, report: ReportHeader, responses: int) -> CheckResult | None:
        """`collapse/reward` after one more step of `responses` responses."""
        metrics = report.metrics
        mean = number(metrics, REWARD_MEAN)
        self._window.append((mean, number(metrics, REWARD_STD) ** 2 / max(responses, 1)))
        if len(self._window) < PATIENCE:
            return None
        now = sum(m for m, _ in self._window) / PATIENCE
        variance = sum(v for _, v in self._window) / PATIENCE**2
        if now > self._peak:
            self._peak, self._peak_var = now, variance
        below = all(m < HALF * self._peak for m, _ in self._window) and self._peak > 0
        spread = math.sqrt(variance + self._peak_var)
        clear = self._peak - now > PEAK_Z * spread
        share = now / self._peak if self._peak > 0 else 1.0
        text = f"mean reward of {PATIENCE} steps {now:.3f}, peak {self._peak:.3f}"
        # Reported as the share lost, so that larger is worse.
        value = 1 - share if below and clear else min(1 - share, HALF)
        return judge("collapse/reward", max(0.0, value), text, fail=HALF, step=report.step)


class Drifts:
    """Repetition, length and entropy against the first steps, each for PATIENCE consecutive steps."""

    def __init__(self) -> None:
        self._start: dict[str, list[float]] = {}
        self._streak: dict[str, int] = {}

    def add(self, report: ReportHeader, max_new_tokens: int) -> list[CheckResult]:
        """`collapse/repetition`, `collapse/length` and `collapse/entropy` after one more step."""
        metrics = report.metrics
        results = []
        repeated = metrics.get(RESPONSE_REPETITION)
        if isinstance(repeated, (int, float)):
            start = self._first("repetition", repeated)
            bad = repeated > REPEATED_FAIL and repeated > REPEATED_TIMES * start
            text = (
                f"{repeated:.0%} of 4-grams repeat an earlier one of their response, {start:.0%} in the "
                "first steps"
            )
            results.append(self._judge("repetition", bad, repeated, REPEATED_FAIL, text, report, "fail"))
        length = number(metrics, RESPONSE_LENGTH_MEAN)
        cut = number(metrics, RESPONSE_TRUNCATED_FRACTION)
        start, start_cut = self._first("length", length), self._first("truncated", cut)
        long = cut > LONG_FAIL and start_cut < LONG_START
        short = length < max(1.5, SHORT_TIMES * start) and start > 4
        text = (
            f"mean length {length:.1f} of at most {max_new_tokens} tokens ({start:.1f} in the first steps), "
            f"{cut:.0%} truncated ({start_cut:.0%} in the first steps)"
        )
        results.append(self._judge("length", long or short, length, None, text, report, "warn"))
        if RESPONSE_ENTROPY in metrics:
            entropy = number(metrics, RESPONSE_ENTROPY)
            start = self._first("entropy", entropy)
            bad = entropy > 1.0 and entropy > ENTROPY_TIMES * start
            text = f"mean -log mu of drawn tokens {entropy:.3f} nats, {start:.3f} in the first steps"
            results.append(self._judge("entropy", bad, entropy, None, text, report, "warn"))
        return results

    def _first(self, name: str, value: float) -> float:
        kept = self._start.setdefault(name, [])
        if len(kept) < START:
            kept.append(value)
        return sum(kept) / len(kept)

    def _judge(
        self,
        name: str,
        bad: bool,
        value: float,
        threshold: float | None,
        text: str,
        report: ReportHeader,
        worst: str,
    ) -> CheckResult:
        self._streak[name] = self._streak.get(name, 0) + 1 if bad else 0
        status = worst if self._streak[name] >= PATIENCE else "ok"
        return CheckResult.model_validate(
            {
                "name": f"collapse/{name}",
                "status": status,
                "value": value,
                "threshold": threshold,
                "evidence": text,
                "step": report.step,
                "version": report.version,
            }
        )
