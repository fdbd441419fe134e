"""`version`: rollouts and samplers have the version they report, and resyncs take effect."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from leeway.checks.facts import Metrics, Trained, number
from leeway.checks.result import CheckResult, judge
from leeway.messages import ReportHeader, SamplerStatus
from leeway.metrics.areas.discrepancy import DISC_KL
from leeway.metrics.areas.lag import LAG_AGE, LAG_ESS_TOK, LAG_KL
from leeway.metrics.areas.resync import KL_SELF_PREFIX, RESYNC_MISSING, RESYNC_MISSING_SE, RESYNC_SAMPLER

AGE_SLACK = 1
"""Steps beyond sync.max_age that a late verdict may add."""
FRESH_ESS = 0.9
"""At age 0 theta and theta_s are equal up to the wire type, so ESS is 1 and not 0.9."""
MISSING_FAIL, MISSING_WARN = 0.25, 0.15
"""Share of an update that a sampler lacks; a quantised engine may lose part of a small update."""
MISSING_Z = 5.0
"""Standard errors by which the share must differ from 0: 3e-7 by chance."""
ALIGNED = 0.12
"""An engine's error is constant while its weights are, and may be aligned with an update by chance. The share
then has a standard deviation of this times sqrt(discrepancy KL / update KL), measured on 40 toy resyncs."""
TAKEN = 0.5
"""Share of the lag before a resync that may remain as discrepancy after it."""
CLEAR_LAG, MIN_LAG = 8.0, 1e-3
"""A lag below this multiple of the usual discrepancy, or below this many nats, is too small to compare."""


def check_spans(trained: Trained) -> CheckResult:
    """`version/spans`: every trained token was drawn under the version of theta_s."""
    low, high = trained.versions
    off = max(abs(low - trained.version), abs(high - trained.version))
    text = f"all {trained.tokens} tokens under version {trained.version}"
    if off:
        text = f"tokens of versions {low} to {high} were trained against theta_s of version {trained.version}"
    return judge("version/spans", float(off), text, fail=0.0, step=trained.step, version=trained.version)


def check_age(report: ReportHeader, max_age: int | None) -> CheckResult:
    """`version/age`: optimiser steps between the weights that drew a batch and those it updated."""
    age = number(report.metrics, LAG_AGE)
    text = f"batch {report.step} is {age:.0f} steps old; sync.max_age is {max_age}"
    return judge(
        "version/age",
        age,
        text,
        fail=None if max_age is None else float(2 * max_age + AGE_SLACK),
        warn=None if max_age is None else float(max_age + AGE_SLACK),
        step=report.step,
        version=report.version,
    )


def check_attested(
    statuses: Sequence[SamplerStatus], epoch: int, digests: Mapping[int, str]
) -> CheckResult | None:
    """`version/attested`: each sampler has loaded the bytes published under the version it reports."""
    known = [s for s in statuses if s.epoch == epoch and s.version in digests]
    if not known:
        return None
    wrong = [s for s in known if s.digest != digests[s.version]]
    text = ", ".join(f"{s.sampler} version {s.version}" for s in known[:8]) + " attested by digest"
    if wrong:
        s = wrong[0]
        text = (
            f"{s.sampler} reports version {s.version} with digest {s.digest or '(none)'}; that version was "
            f"published with {digests[s.version]}"
        )
    return judge("version/attested", float(len(wrong)), text, fail=0.0)


class ResyncTook:
    """Tests whether the first fresh batch after a resync was drawn with all of the new weights.

    At age 0 there must be no lag. If the trainer also scored the batch with the old weights, the measure is
    the share of the update that the reported log-probs lack; otherwise the discrepancy must not have grown to
    the size of the earlier lag.
    """

    def __init__(self) -> None:
        self._last: ReportHeader | None = None

    def add(self, report: ReportHeader) -> CheckResult | None:
        """`version/resync_took` for the first batch of a version, else None."""
        before, self._last = self._last, report
        if before is None or before.epoch != report.epoch or before.version == report.version:
            return None
        metrics = report.metrics
        ess = number(metrics, LAG_ESS_TOK, 1.0)
        if RESYNC_MISSING in metrics:
            missing, text = _measured(metrics)
        else:
            missing, text = _by_size(before.metrics, metrics)
        if number(metrics, LAG_AGE) == 0 and ess < FRESH_ESS:
            missing = 1.0
            text += f"; ESS is {ess:.3f} at age 0, so theta_s is not what was published"
        took = "resync did not take effect: first batch" if missing > MISSING_FAIL else "first batch"
        return judge(
            "version/resync_took",
            missing,
            f"{took} of version {report.version}: {text}",
            fail=MISSING_FAIL,
            warn=MISSING_WARN,
            step=report.step,
            version=report.version,
        )


def _measured(metrics: Metrics) -> tuple[float, str]:
    missing = number(metrics, RESYNC_MISSING)
    by_chance = ALIGNED * math.sqrt(
        max(number(metrics, DISC_KL), 0.0) / max(number(metrics, KL_SELF_PREFIX), 1e-12)
    )
    error = math.hypot(number(metrics, RESYNC_MISSING_SE), by_chance)
    sampler = metrics.get(RESYNC_SAMPLER, "the sampler")
    text = f"{missing:.0%} ± {error:.0%} of the update is missing from the log-probs of {sampler}"
    return (max(missing, 0.0) if missing > MISSING_Z * error else 0.0), text


def _by_size(before: Metrics, now: Metrics) -> tuple[float, str]:
    lag, usual, disc = (number(before, LAG_KL), number(before, DISC_KL), number(now, DISC_KL))
    text = f"discrepancy {disc:.2g} nats after a lag of {lag:.2g}, {usual:.2g} before"
    if lag <= max(CLEAR_LAG * usual, MIN_LAG):
        return 0.0, text
    left = (disc - usual) / lag
    return (left if left > TAKEN else 0.0), text
