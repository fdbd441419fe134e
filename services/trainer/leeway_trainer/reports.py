"""What the trainer reports: the start of an epoch, every step with its metrics, a failed resync, the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leeway.batches import prompts_digest, tickets_digest
from leeway.checks.facts import trained_facts
from leeway.config import RunConfig
from leeway.config.identity import identify
from leeway.errors import LeewayError
from leeway.messages import ReportHeader, Rollout
from leeway.metrics.areas.data import BATCH_DIGEST, BATCH_TICKETS
from leeway.metrics.areas.lag import LAG_AGE
from leeway.metrics.areas.reward import REWARD_ERROR
from leeway.metrics.areas.tokens import ROLLOUTS_REDRAWN
from leeway.streams import Keys
from leeway.telemetry.tracing import messaging, span, traceparent
from leeway_trainer.epochs import RunEpoch
from leeway_trainer.metrics import observe
from leeway_trainer.timing import Metrics, StepTimes
from leeway_trainer.versions import BatchWeights

Reported = dict[str, float | str]


class RewardsFailedError(LeewayError):
    """No response of a batch could be scored."""


def check_rewards(rollouts: Sequence[Rollout], step: int) -> None:
    """Raise RewardsFailedError when the reward failed on every response: there is nothing to learn from."""
    errors = [r.header.reward_error for r in rollouts]
    if all(errors):
        raise RewardsFailedError(
            f"step {step}: the reward failed on all {len(errors)} responses, first with: {errors[0]}; "
            "check task.reward and task.reward_timeout_s"
        )


class Reports:
    """Writes the reports of a run. Only rank 0 has a feed; elsewhere nothing is written."""

    def __init__(self, config: RunConfig, keys: Keys, times: StepTimes) -> None:
        self.config, self.keys, self.times = config, keys, times
        self._identity = identify(config)
        self._last_step: ReportHeader | None = None
        self._last: ReportHeader | None = None

    def write(
        self,
        event: str,
        epoch: RunEpoch,
        *,
        step: int,
        version: int,
        age: int,
        metrics: Mapping[str, float | str] | None = None,
    ) -> None:
        """Write report `event`. `age`: optimiser steps that samplers' weights are behind now."""
        if epoch.feed is None:
            return
        observe(event, metrics or {})
        with span("report", messaging("send", self.keys.reports), kind="producer"):
            header = ReportHeader.model_validate(
                {
                    "event": event,
                    "epoch": epoch.number,
                    "step": step,
                    "version": version,
                    "age": age,
                    "config": self._identity.digest,
                    "metrics": metrics or {},
                    "traceparent": traceparent(),
                }
            )
            self._last = header
            if event == "step":
                self._last_step = header
            epoch.feed.report(header)

    def repeat_last_step(self, epoch: RunEpoch) -> None:
        """Write the last step's report again, for a server that may have lost it; readers drop a repeat."""
        if epoch.feed is not None and self._last_step is not None:
            epoch.feed.report(self._last_step)

    def repeat_last(self, epoch: RunEpoch) -> None:
        """Write the last report of this epoch again: a server that failed over may have lost it."""
        if epoch.feed is not None and self._last is not None and self._last.epoch == epoch.number:
            epoch.feed.report(self._last)

    def of_step(
        self, metrics: Metrics, step: int, rollouts: Sequence[Rollout], drawn: BatchWeights, epoch: RunEpoch
    ) -> Reported:
        """Everything that the report of a step contains."""
        found: Reported = {
            **self.times.report(metrics),
            LAG_AGE: float(drawn.age),
            BATCH_DIGEST: prompts_digest(r.prompt_ids for r in rollouts),
            ROLLOUTS_REDRAWN: float(sum(r.header.redraws > 0 for r in rollouts)),
            BATCH_TICKETS: tickets_digest(r.header.ticket_id for r in rollouts),
            **trained_facts(rollouts, self.config.batch, step),
            **drawn.kl,
        }
        if epoch.feed is not None:
            found |= epoch.feed.take_counts()
        if error := next((r.header.reward_error for r in rollouts if r.header.reward_error), None):
            found[REWARD_ERROR] = error[:200]
        return found
