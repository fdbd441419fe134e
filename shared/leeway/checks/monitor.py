"""Monitor: turns facts into check results, without I/O.

    rollout as published -> sampling_distribution, retokenisation/drift; ledger of the batch
    step report          -> everything that compares a trained batch with its plan, its history, its versions
    sampler statuses     -> engine settings, probes, attestations

A report must be passed after all rollouts of its batch. Rollouts are in Redis before the trainer can read
them, so it is enough to read the stream of reports to its end first, and then the stream of rollouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from leeway.checks import deferral, retokenisation, reward_filter, sampling, version
from leeway.checks.collapse import Drifts, RewardCollapse, check_self_prefix
from leeway.checks.facts import Ledger, Trained
from leeway.checks.numerics import Discrepancy, NonFinite, check_log_ratio
from leeway.checks.result import CheckResult
from leeway.config import RunConfig
from leeway.messages import ReportHeader, Rollout, SamplerStatus


def is_sampled(ticket_id: str, fraction: float) -> bool:
    """Whether a rollout is inspected; depends on its ticket alone and not on what was drawn."""
    digest = hashlib.blake2b(ticket_id.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") < fraction * 2**32


VERSIONS_KEPT = 256
"""Number of versions whose digests are compared with what samplers attest."""


class Monitor:
    """All checks of one run. `round_trip` decodes and re-encodes token ids; None: drift is not measured."""

    def __init__(self, config: RunConfig, round_trip: retokenisation.RoundTrip | None = None) -> None:
        self.config = config
        self.ledger = Ledger()
        self.non_finite = NonFinite()
        self._support = sampling.Support(config.sampling)
        self._calibration = sampling.Calibration()
        self._drift = retokenisation.Drift(round_trip) if round_trip else None
        self._ratio, self._probes = sampling.RatioMean(), sampling.Probes()
        self._selection, self._age = deferral.Selection(), deferral.AgeCorrelation()
        self._resync_took = version.ResyncTook()
        self._discrepancy = Discrepancy()
        self._reward, self._drifts = RewardCollapse(), Drifts()
        self._digests: dict[int, str] = {}
        self._epoch = -1

    def on_rollout(self, rollout: Rollout) -> None:
        """Add an entry of the stream `rollouts`, in the order of the stream."""
        self.ledger.add(rollout)
        if is_sampled(rollout.header.ticket_id, self.config.checks.sample_fraction):
            self._support.add(rollout)
            self._calibration.add(rollout)
            if self._drift:
                self._drift.add(rollout)

    def on_rejected(self, text: str) -> None:
        """Record that a rollout, a weight or a loss was rejected because it is not finite."""
        self.non_finite.add_rejected(text)

    def on_manifest(self, epoch: int, number: int, digest: str) -> None:
        """Record that a weight version was published."""
        if epoch != self._epoch:
            self._epoch, self._digests = epoch, {}
        self._digests[number] = digest
        while len(self._digests) > VERSIONS_KEPT:
            del self._digests[next(iter(self._digests))]

    def on_statuses(self, statuses: Sequence[SamplerStatus]) -> list[CheckResult]:
        """Evaluate the statuses of live samplers and the rollouts so far."""
        for status in statuses:
            self.non_finite.add_sampler(status.sampler, status.bad_logprobs, status.error)
        return _some(
            sampling.check_engine(statuses),
            self._probes.add(statuses),
            version.check_attested(statuses, self._epoch, self._digests),
            self._support.result(),
            self._calibration.result(),
            self._drift.result() if self._drift else None,
            self.non_finite.result(),
        )

    def on_step(self, report: ReportHeader) -> list[CheckResult]:
        """Evaluate a step report, after the rollouts of its batch."""
        config = self.config
        results = _some(
            self._ratio.add(report),
            version.check_age(report, config.sync.max_age),
            self._resync_took.add(report),
            check_log_ratio(report),
            self._discrepancy.add(report),
            check_self_prefix(report),
            self._reward.add(report, config.batch.size),
            *self._drifts.add(report, config.sampling.max_new_tokens),
        )
        trained = Trained.of(report)
        if trained is not None:
            results += self._on_trained(trained, report.epoch)
        self.ledger.forget(report.epoch, report.step + 1)
        return results

    def _on_trained(self, trained: Trained, epoch: int) -> list[CheckResult]:
        ledger, batch = self.ledger, self.config.batch
        return _some(
            retokenisation.check_unchanged(trained, ledger, epoch),
            deferral.check_outstanding(trained, ledger, epoch, batch),
            deferral.check_lengths(trained, ledger, epoch, batch),
            self._selection.add(trained, ledger, epoch, batch),
            self._age.add(trained),
            reward_filter.check_groups(trained, ledger, epoch, batch),
            reward_filter.check_rewards(trained, ledger, epoch, batch),
            reward_filter.check_denominators(trained, batch),
            version.check_spans(trained),
        )


def _some(*results: CheckResult | None) -> list[CheckResult]:
    return [result for result in results if result is not None]


def replay(config: RunConfig, reports: Iterable[ReportHeader]) -> list[CheckResult]:
    """Results from step reports alone, for a run whose streams no longer exist."""
    monitor = Monitor(config)
    return [result for report in reports for result in monitor.on_step(report)]
