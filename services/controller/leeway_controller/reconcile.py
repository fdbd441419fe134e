"""The controller's loop: reports and manifests in, verdicts and tickets out.

One pass (`tick`), and the gate at each stage:

    reports    started  -> a new run epoch; everything of older epochs is void
               step     -> verdict: continue or resync            the trainer waits for it
               finished -> the loop ends, unless `stay`
       |       waits for: an entry in `reports`, at most block_s
    manifests  a newer version -> pending                         issuing stops
       |       waits for: the trainer to publish; unblocked by: its manifest, or `resync_failed`
    samplers   all live ones attest the pending version -> current
       |       waits for: their attestations; unblocked by: the last of them, or sync.commit_timeout_s,
       |       after which those that are late are fenced
    issue      tickets of the next batches under the current version
       |       waits for: a current version with none pending or awaited, the trainer to be at most
       |       sync.max_lead batches behind, and a trainer of this controller's configuration;
       |       unblocked by: a commit, or the report of a step; a restart of trainer or controller
    server     without this controller's term: it lost the run's data; begin again with an empty state
               with an older state: it lost its last writes; issue unfinished batches again
    progress   StalledError after sync.stall_timeout_s without any of these

The state is written in the same MULTI as what it describes (`store.py`), so that a restarted controller
continues exactly there.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import redis

from leeway.config import RunConfig
from leeway.config.identity import identify, name_keys, short
from leeway.events import CONFIG_DIFFERS, EventWriter
from leeway.messages import (
    MessageError,
    Report,
    ReportHeader,
    SamplerStatus,
    Verdict,
    VerdictHeader,
    decode,
    encode,
)
from leeway.streams import ROLLOUTS_GROUP, TICKETS_GROUP, Consumer, Entry, Keys, Tail, add_fields, now
from leeway.telemetry.tracing import messaging, span, traceparent
from leeway.weights import parse_manifest
from leeway_controller import metrics
from leeway_controller.check_feed import CheckFeed
from leeway_controller.issue import PromptEncoder, TicketIssuer
from leeway_controller.progress import ProgressWatch
from leeway_controller.reports import ReportReader
from leeway_controller.samplers import SamplerRoster
from leeway_controller.state import ControllerState, decide, decide_commit, plan_issue
from leeway_controller.store import StateLostError, StateStore

log = logging.getLogger(__name__)

BLOCK_S = 0.2
"""Maximum wait for a report in one pass."""
VERDICTS_KEPT = 1000


class Controller:
    """One run's controller. `encode_item` returns prompt ids; `size`: number of items in the data set.

    `stay`: keep running after the trainer has finished; it may be started again with more steps.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        config: RunConfig,
        encode_item: PromptEncoder,
        size: int,
        check_feed: CheckFeed | None = None,
        *,
        stay: bool = False,
    ) -> None:
        self.client, self.keys, self.config = client, keys, config
        self.check_feed, self.stay = check_feed, stay
        self.identity = identify(config)
        self.store = StateStore(client, keys, identity=self.identity, budget_s=config.redis.reconnect_s)
        self.events = EventWriter(client, keys, "controller", budget_s=config.redis.reconnect_s)
        self._open_streams()
        self.issuer = TicketIssuer(self.store, config, encode_item, size)
        self.progress = ProgressWatch(client, keys, config)
        self._ticked_at = time.monotonic()
        self._differed = ""
        """Configuration of a trainer that was announced as another one than this controller's."""
        self._stopping = False

    def _open_streams(self) -> None:
        client, keys, budget_s = self.client, self.keys, self.config.redis.reconnect_s
        self.reports = ReportReader(client, keys, f"controller-{self.store.term}", budget_s=budget_s)
        for stream, group in ((keys.tickets, TICKETS_GROUP), (keys.rollouts, ROLLOUTS_GROUP)):
            Consumer(client, stream, group, "controller", budget_s=budget_s)  # creates stream and group
        self.manifests = Tail(client, keys.weights, budget_s=budget_s)
        self.samplers = SamplerRoster(
            client, keys, self.events, silence_s=self.config.sync.ticket_idle_s, budget_s=budget_s
        )

    # -- what other threads use ----------------------------------------------------------------------------

    def stop(self) -> None:
        """End the loop after the current pass."""
        self._stopping = True

    def sampler_lost(self, sampler: str, why: str) -> None:
        """A sampler's process is known to be gone; the next pass removes it without waiting for silence."""
        self.samplers.lost(sampler, why)

    def seconds_since_tick(self) -> float:
        """Seconds since the last pass ended, for the liveness probe."""
        return time.monotonic() - self._ticked_at

    # -- the loop ------------------------------------------------------------------------------------------

    @property
    def state(self) -> ControllerState:
        """What was committed last."""
        return self.store.state

    def run(self) -> None:
        """Until the trainer reports that it finished, or `stop`.

        Raises StalledError, DeposedError, PolicyError, MessageError, RedisUnavailable.
        """
        while not self._stopping and (self.stay or not self.state.finished):
            self.tick(block_s=BLOCK_S)
            self._ticked_at = time.monotonic()

    def tick(self, block_s: float = 0.0) -> None:
        """One pass; waits up to `block_s` for a report."""
        try:
            if not self.store.check():
                self._write_again()
            self._pass(block_s)
        except StateLostError as lost:
            self._begin_again(lost)

    def _begin_again(self, lost: StateLostError) -> None:
        """Follow whatever trainer reports to a server that lost the run's data, also a new one."""
        self.store.begin_again()
        self._open_streams()
        self.events.write(
            "warning", "state_lost", f"{lost}: the controller begins again with what the trainer reports"
        )

    def _write_again(self) -> None:
        """A failover has lost what was written last: issue again all batches that are not trained."""
        self.manifests.last_id = "0"
        self.store.commit(self.state.reissued())
        self.events.write(
            "warning",
            "writes_lost",
            f"the server has lost its last writes; batches from {self.state.next_step} on are issued again",
        )

    def _pass(self, block_s: float) -> None:
        for entry in self.reports.read(block_s):
            self._on_report(entry)
        for entry in self.manifests.read(block_s=None):
            self._on_manifest(entry)
        self._on_samplers(self.samplers.poll())
        self._check_config()
        sync, digest = self.config.sync, self.identity.digest
        for batch in plan_issue(self.state, sync.max_lead, self.config.trainer.steps, digest):
            self.issuer.issue(batch)
        if self.check_feed:
            config = self.state.config
            self.check_feed.poll([s for s in self.samplers.statuses() if s.config == config])
        self.progress.check(self.state, self.samplers)

    def _check_config(self) -> None:
        """Announce a trainer of another configuration, which gets no tickets from this controller."""
        epoch, theirs = self.state.epoch, self.state.config
        differs = theirs if epoch >= 0 and theirs != self.identity.digest else ""
        if differs and differs != self._differed:
            keys = self.identity.differences(self.store.trainer_identity())
            self.events.write(
                "warning",
                CONFIG_DIFFERS,
                f"no tickets are issued: the trainer of run epoch {epoch} has configuration {short(theirs)}, "
                f"this controller has {short(self.identity.digest)}{name_keys(keys)}; restart the one that "
                "has the old configuration",
            )
        self._differed = differs

    # -- reports -------------------------------------------------------------------------------------------

    def _on_report(self, entry: Entry) -> None:
        try:
            report = decode(Report, entry.fields).header
        except MessageError as exc:
            self.events.write("error", "bad_report", f"a report was rejected: {exc}")
            self.reports.answer(entry, self.store, self.state)
            return
        next_step = self._is_next_step(report)
        after = self.state if next_step else self._after(report)
        if next_step or after != self.state:  # not a repeated report
            self.progress.seen()
            if self.check_feed:
                self.check_feed.on_report(report)
        name = "verdict" if report.event == "step" else report.event
        attributes = {**messaging("process", self.keys.reports), "leeway.step": report.step}
        with span(name, attributes, kind="consumer", parent=report.traceparent):
            if next_step:
                self._answer_step(entry, report)
            else:
                self.reports.answer(entry, self.store, after)

    def _is_next_step(self, report: ReportHeader) -> bool:
        """False for other reports, and for steps that were answered before."""
        state = self.state
        return report.event == "step" and report.epoch == state.epoch and report.step >= state.next_step

    def _after(self, report: ReportHeader) -> ControllerState:
        """The state after a report that needs no verdict."""
        state = self.state
        if report.event == "started" and report.epoch > state.epoch:
            self.manifests.last_id = "0"  # manifests of this epoch may precede its report
            return state.started(report)
        if report.event == "resync_failed":
            return state.kept(report)
        if report.event == "finished":
            return state.ended(report)
        return state

    def _answer_step(self, entry: Entry, report: ReportHeader) -> None:
        self.progress.stepped = True
        manual = self.store.manual_resync_requested()
        decision = decide(report, self.config.sync, self.config.trainer.steps, manual)
        if decision.reason:
            log.info("step %d: resync (%s)", report.step, decision.reason)
        verdict = Verdict(
            VerdictHeader(
                epoch=report.epoch,
                step=report.step,
                action=decision.action,
                reason=decision.reason,
                traceparent=traceparent(),
            )
        )
        metrics.verdict(decision, report)

        def effects(pipe: Any) -> None:
            add_fields(pipe, self.keys.verdicts, encode(verdict), maxlen=VERDICTS_KEPT)
            if manual and decision.action == "resync":
                self.store.queue_manual_resync_done(pipe)

        self.reports.answer(entry, self.store, self.state.stepped(report, decision), effects)

    # -- versions ------------------------------------------------------------------------------------------

    def _on_manifest(self, entry: Entry) -> None:
        manifest = parse_manifest(entry.fields)
        if self.check_feed:
            self.check_feed.on_manifest(manifest)
        state = self.state.published(manifest.epoch, manifest.version, manifest.step, now(), manifest.digest)
        if state is not self.state:
            self.store.commit(state)
            self.progress.seen()

    def _on_samplers(self, live: list[SamplerStatus]) -> None:
        metrics.observe(self.state, live)
        self.progress.count_responses(live)
        # A sampler of another configuration loads no weights of this epoch and draws nothing for it.
        live = [status for status in live if status.config == self.state.config]
        timeout_s = self.config.sync.commit_timeout_s
        attested = decide_commit(self.state, live, now(), timeout_s, self.samplers.fences.active)
        for name in attested.back:
            self.samplers.readmit(name)
        newest = self.state.pending or self.state.current
        for name in attested.wrong:
            why = f"holds weights other than those of version {newest}"
            self.samplers.fence(name, self.state, why, full=True)
        if not attested.commit:
            return
        self.store.commit(self.state.committed())
        self.progress.seen()
        log.info("version %s is current on %d samplers", newest, len(live) - len(attested.late))
        for name in attested.late:
            why = f"did not attest version {newest} within {timeout_s:g} s"
            self.samplers.fence(name, self.state, why, full=False)
