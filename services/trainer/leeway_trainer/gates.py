"""The two gates of the loop. Rank 0 waits; all ranks learn what came of it and take the same branch.

rollouts   waits for: every slot of the next batch, drawn under the current version and run epoch
           unblocked by: samplers | a late request for a resync (a late verdict, `leeway resync`, a sampler
           that cannot load the current version) | a stop | a server that lost the streams
           budget: sync.stall_timeout_s without a rollout, then StalledError
           The last report is repeated every sync.verdict_timeout_s: without it, no tickets would come

verdict    waits for: the controller's verdict on the step just reported
           unblocked by: the verdict | sync.verdict_timeout_s, then the same policy is applied here | a stop
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import IntEnum

from leeway.config import RunConfig
from leeway.messages import Rollout, pack, unpack
from leeway.metrics.areas.resync import VERDICT_SELF
from leeway.metrics.areas.time import TIME_VERDICT_S
from leeway.policies import SyncFacts, decide_resync, read_facts
from leeway.telemetry.tracing import add_link, span
from leeway_trainer.epochs import RunEpoch
from leeway_trainer.feed import Feed, StreamsLostError
from leeway_trainer.ranks import Ranks
from leeway_trainer.timing import Metrics, StepTimes

log = logging.getLogger(__name__)

REPEAT_S = 2.0
"""Shortest interval at which a report is repeated while rollouts are awaited."""


class Command(IntEnum):
    """What all ranks do next."""

    STOP = 0
    TRAIN = 1
    RESYNC = 2
    NEW_EPOCH = 3


def sync_facts(metrics: Metrics, step: int, age: int, config: RunConfig) -> SyncFacts:
    """What the resync policy looks at after `step`; `age`: optimiser steps that samplers are behind now."""
    return read_facts(metrics, step=step, age=age, last=step + 1 >= config.trainer.steps)


class Gates:
    """The gates of one run epoch. `stopping`: whether this process was asked to stop.

    `answered`: verdicts on steps before this one are settled: the resync was done, or failed.
    `repeat_report`: writes the last report again, in case the server lost it in a failover.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        epoch: RunEpoch,
        times: StepTimes,
        *,
        stopping: Callable[[], bool],
        keyframe_wanted: Callable[[], bool],
        repeat_report: Callable[[], None],
    ) -> None:
        self.config, self.ranks, self.epoch, self.times = config, ranks, epoch, times
        self.answered = epoch.first_batch
        self._stopping, self._keyframe_wanted = stopping, keyframe_wanted
        self._repeat_report = repeat_report

    def next_command(self, batch: int) -> Command:
        """Wait at gate `rollouts`. Raises StalledError and SupersededError, on rank 0."""
        feed = self.epoch.feed
        found = Command.STOP if feed is None else self._wait(feed, batch)
        return Command(self.ranks.share_int(found))

    def take(self) -> list[Rollout]:
        """The batch that gate `rollouts` found complete, on every rank, in slot order."""
        rollouts = self.epoch.feed.take() if self.epoch.feed else []
        if self.ranks.size > 1:
            rollouts = unpack(self.ranks.share_bytes(pack(rollouts)))
        return rollouts

    def resync_wanted(self, facts: SyncFacts) -> bool:
        """Wait at gate `verdict`; whether the weights are to be published now."""
        wanted, feed = False, self.epoch.feed
        if feed is not None and not facts.last and not self._stopping():
            wanted = self._await_verdict(feed, facts)
        return bool(self.ranks.share_int(int(wanted)))

    def _wait(self, feed: Feed, batch: int) -> Command:
        repeat_s = max(REPEAT_S, self.config.sync.verdict_timeout_s)
        repeated = time.monotonic()

        def wake() -> bool:
            nonlocal repeated
            feed.verdicts.poll()
            if time.monotonic() - repeated > repeat_s:
                repeated = time.monotonic()
                self._repeat_report()
            return (
                self._stopping()
                or feed.verdicts.resync_since(self.answered) is not None
                or self._keyframe_wanted()
            )

        try:
            if feed.wait(wake, first=batch == self.epoch.first_batch):
                return Command.TRAIN
        except StreamsLostError as error:
            log.warning("%s", error)
            return Command.NEW_EPOCH
        return Command.STOP if self._stopping() else Command.RESYNC

    def _await_verdict(self, feed: Feed, facts: SyncFacts) -> bool:
        started = time.monotonic()
        with span("await verdict") as opened:
            verdict = feed.verdicts.wait(facts.step, self.config.sync.verdict_timeout_s, self._stopping)
            if verdict is not None:
                add_link(opened, verdict.traceparent)
        self.times.set(TIME_VERDICT_S, time.monotonic() - started)
        # Also a verdict on an earlier step that arrived too late.
        wanted = feed.verdicts.resync_since(self.answered) is not None
        if verdict is None and not self._stopping():
            wanted = wanted or decide_resync(facts, self.config.sync).reason is not None
            self.times.set(VERDICT_SELF, 1.0)
            log.warning(
                "step %d: no verdict within %.1f s, the trainer applies the policy itself: resync=%s",
                facts.step,
                self.config.sync.verdict_timeout_s,
                wanted,
            )
        return wanted
