"""`sampling_distribution`: the sampler reports the distribution that it draws from.

Each measure detects a different fault. `support`: a distribution that does not sum to 1. `calibration` and
`probe`: log-probabilities that are not those of the draw (raw log-probs at a temperature). `ratio_mean`: mass
that the trainer has but the sampler lacks (top-p without its support, a banned token). `engine`: a setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from leeway.checks.facts import number
from leeway.checks.result import CheckResult, judge
from leeway.checks.stats import RunningZ, chi_square_z
from leeway.config import SamplingConfig
from leeway.messages import ReportHeader, Rollout, SamplerStatus
from leeway.metrics.areas.discrepancy import DISC_RATIO_MEAN, DISC_RATIO_STD
from leeway.metrics.areas.tokens import TOKENS

SUM_TOLERANCE = 1e-3
"""Above the rounding of float32 log-probabilities over a few thousand tokens."""
Z_FAIL, Z_WARN = 6.0, 5.0
"""Two-sided 2e-9 and 6e-7 per evaluation: with one per step, one false warning in a million steps."""
MIN_EFFECT = 3e-3
"""A smaller deviation, even if significant, changes gradients by less than their noise."""
MIN_TOKENS = 200
WINDOW = 64
"""Number of batches (ratio_mean), or of rollouts divided by 16 (calibration), that are evaluated together."""
WANTED_MODE = "processed_logprobs"


class Support:
    """Tests whether reported heads are distributions: their sums, and that they contain the drawn token."""

    def __init__(self, sampling: SamplingConfig) -> None:
        self.sampling = sampling
        self.positions = self.bad = 0
        self.worst, self.example = 0.0, ""

    def add(self, rollout: Rollout) -> None:
        """Add one rollout."""
        if self.sampling.head_tokens == 0:
            return
        sizes = np.diff(rollout.head_offsets)
        owner = np.repeat(np.arange(sizes.size), sizes)
        mass = np.bincount(owner, weights=np.exp(rollout.head_logp.astype(np.float64)), minlength=sizes.size)
        error = np.maximum(mass - 1.0, 0.0)
        if rollout.header.support_complete:
            error = np.abs(mass - 1.0)
        else:
            short = (1.0 - self.sampling.head_eps) - mass
            error = np.maximum(error, np.where(sizes < self.sampling.head_tokens, short, 0.0))
        drawn = rollout.head_ids == rollout.response_ids[owner]
        gap = np.abs(rollout.head_logp[drawn] - rollout.logp[owner[drawn]])
        np.maximum.at(error, owner[drawn], gap)
        if rollout.header.support_complete:
            inside = np.bincount(owner[drawn], minlength=sizes.size) > 0
            error = np.where(inside, error, 1.0)
        self.positions += sizes.size
        self.bad += int((error > SUM_TOLERANCE).sum())
        if error.size and error.max() > self.worst:
            self.worst, at = float(error.max()), int(error.argmax())
            self.example = f"token {at} of {rollout.header.ticket_id}: head mass {mass[at]:.4f}"

    def result(self) -> CheckResult | None:
        """`sampling_distribution/support`."""
        if not self.positions:
            return None
        text = f"{self.bad} of {self.positions} positions off by more than {SUM_TOLERANCE:g}"
        text += f"; worst: {self.example}" if self.bad else ""
        return judge("sampling_distribution/support", self.worst, text, fail=SUM_TOLERANCE)


class Calibration:
    """How often the first token of the head was drawn, against its reported probability.

    Samplers put the most likely token first; any choice that is made before the draw would be valid.
    """

    def __init__(self) -> None:
        self._z = RunningZ(WINDOW * 16)

    def add(self, rollout: Rollout) -> None:
        """Add one rollout."""
        first = rollout.head_offsets[:-1]
        if (np.diff(rollout.head_offsets) < 1).any():
            return
        p = np.minimum(np.exp(rollout.head_logp[first].astype(np.float64)), 1.0)
        hit = rollout.head_ids[first] == rollout.response_ids
        self._z.add(float((hit - p).sum()), float((p * (1 - p)).sum()), p.size)

    def result(self) -> CheckResult | None:
        """`sampling_distribution/calibration`."""
        if self._z.count < MIN_TOKENS:
            return None
        return _judge_z(
            "sampling_distribution/calibration",
            self._z,
            f"the most likely token was drawn {self._z.mean:+.2%} more often than reported",
        )


class RatioMean:
    """E_mu[pi_s / mu] over drawn tokens: 1 for any temperature, top-p, top-k, min-p and lag."""

    def __init__(self) -> None:
        self._z = RunningZ(WINDOW)

    def add(self, report: ReportHeader) -> CheckResult | None:
        """`sampling_distribution/ratio_mean` after one more step."""
        metrics = report.metrics
        if DISC_RATIO_MEAN not in metrics:
            return None
        count = int(number(metrics, TOKENS))
        off, spread = number(metrics, DISC_RATIO_MEAN) - 1.0, number(metrics, DISC_RATIO_STD)
        self._z.add(count * off, count * (spread**2 + off**2), count)
        if self._z.count < MIN_TOKENS:
            return None
        text = f"mean of pi_s/mu over {self._z.count} drawn tokens is {1 + self._z.mean:.4f}"
        return _judge_z("sampling_distribution/ratio_mean", self._z, text, step=report.step)


def _judge_z(name: str, z: RunningZ, text: str, step: int | None = None) -> CheckResult:
    # A deviation must be both significant and large enough to matter.
    value = abs(z.z) if abs(z.mean) > MIN_EFFECT else min(abs(z.z), Z_WARN)
    evidence = f"{text} (z = {z.z:+.1f} over {z.count} tokens)"
    return judge(name, value, evidence, fail=Z_FAIL, warn=Z_WARN, step=step)


class Probes:
    """Chi-square of draws from a fixed prefix against the reported mu; a sampler's probes are summed."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        """Sampler -> version and request of its last probe."""
        self._sums: dict[str, tuple[float, int, int]] = {}
        self._last: dict[str, str] = {}

    def add(self, statuses: Iterable[SamplerStatus]) -> CheckResult | None:
        """`sampling_distribution/probe` after the probes in these statuses."""
        version = None
        for status in statuses:
            probe, name = status.probe, status.sampler
            if probe is None or probe.dof == 0 or self._seen.get(name) == (probe.version, probe.request):
                continue
            self._seen[name] = probe.version, probe.request
            chi2, dof, draws = self._sums.get(name, (0.0, 0, 0))
            self._sums[name] = (chi2 + probe.chi2, dof + probe.dof, draws + probe.draws)
            self._last[name], version = probe.example, probe.version
        if not self._sums:
            return None
        worst = max(self._sums, key=lambda name: chi_square_z(*self._sums[name][:2]))
        chi2, dof, draws = self._sums[worst]
        text = (
            f"{worst}: {draws} draws from fixed prefixes, chi-square {chi2:.1f} on {dof} degrees of freedom; "
            f"last probe: {self._last[worst]}"
        )
        z = max(0.0, chi_square_z(chi2, dof))
        # The cube root is inaccurate this far out for cells of 8 draws, hence the margin above Z_FAIL.
        return judge("sampling_distribution/probe", z, text, fail=Z_FAIL + 1, warn=Z_FAIL, version=version)


def check_engine(statuses: Sequence[SamplerStatus]) -> CheckResult | None:
    """`sampling_distribution/engine`: log-prob mode, and settings that change the distribution unreported."""
    known = [s for s in statuses if s.logprobs_mode]
    if not known:
        return None
    faults = [
        f"{s.sampler} reports logprobs_mode={s.logprobs_mode}, expected {WANTED_MODE}"
        for s in known
        if s.logprobs_mode != WANTED_MODE
    ]
    faults += [f"{s.sampler} bans or biases tokens: {', '.join(s.bans)}" for s in known if s.bans]
    text = "; ".join(faults) or f"{WANTED_MODE}, no bans, on {len(known)} samplers"
    return judge("sampling_distribution/engine", float(len(faults)), text, fail=0.0)


def describe_draws(counts: dict[int, int], probabilities: dict[int, float]) -> str:
    """Text about the reported token whose count deviates most from its probability."""
    draws = sum(counts.values())

    def distance(token: int) -> float:
        expected = draws * probabilities[token]
        return abs(counts.get(token, 0) - expected) / math.sqrt(max(expected, 1.0))

    if not probabilities:
        return "no head was reported"
    token = max(probabilities, key=distance)
    return f"token {token} drawn {counts.get(token, 0)} times, {draws * probabilities[token]:.1f} expected"
