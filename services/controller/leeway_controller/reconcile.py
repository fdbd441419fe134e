"""The controller's loop: reports and manifests in, verdicts and tickets out.

    read reports   -> started: new epoch | step: verdict | finished: end
    read manifests -> a newer version is pending
    read samplers  -> all live ones attest it: it is current
    issue          -> tickets of the next batches under the current version

State is written to Redis in the same MULTI as what it describes, so that a restarted controller goes on
exactly there.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import redis

from leeway.config import RunConfig
from leeway.diagnose import describe_tickets, is_stalled
from leeway.errors import LeewayError, StalledError
from leeway.events import write_event
from leeway.messages import (
    EventLevel,
    MessageError,
    Report,
    ReportHeader,
    SamplerStatus,
    Ticket,
    Verdict,
    VerdictHeader,
    decode,
    encode,
)
from leeway.resync import Decision
from leeway.statuses import read_statuses, remove_status, split_live
from leeway.streams import (
    MANUAL_FIELD,
    REPORTS_GROUP,
    ROLLOUTS_GROUP,
    STATE_FIELD,
    TERM_FIELD,
    TICKETS_GROUP,
    Consumer,
    Entry,
    Keys,
    Tail,
    add_fields,
    now,
    retrying,
)
from leeway.telemetry.tracing import messaging, span, traceparent, tracing
from leeway.weights import parse_manifest
from leeway_controller import metrics
from leeway_controller.checks import Checks
from leeway_controller.plan import plan_batch, plan_tickets
from leeway_controller.state import ControllerState, decide, decide_commit, plan_issue

log = logging.getLogger(__name__)

WRITE_ATTEMPTS = 100
CLAIM_EVERY_S = 2.0
REPORTS_KEPT = 10_000
"""Answered reports that stay in the stream, for the launcher and others who follow it."""
Encoder = Callable[[int], list[int]]
"""Token ids of the prompt of a data set's item."""


class DeposedError(LeewayError):
    """A newer controller works on the run; this one has written nothing since."""


class Controller:
    """One run's controller. `encode_item` gives prompt ids; `size` is the data set's number of items.

    `stay`: do not end when the trainer has finished; it may be started again with more steps.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        config: RunConfig,
        encode_item: Encoder,
        size: int,
        checks: Checks | None = None,
        *,
        stay: bool = False,
    ) -> None:
        self.checks = checks
        self.client, self.keys, self.config = client, keys, config
        self.encode_item, self.size = encode_item, size
        self.budget_s = config.redis.reconnect_s
        self.stay = stay
        # Before the state is read: from here on an older controller cannot change it.
        self.term = self._retry(lambda: client.hincrby(keys.state, TERM_FIELD, 1), "counting controllers")
        self.state = ControllerState.load(client, keys, budget_s=self.budget_s)
        name = f"controller-{self.term}"
        self.reports = Consumer(client, keys.reports, REPORTS_GROUP, name, budget_s=self.budget_s)
        self.claimed_at = float("-inf")
        for stream, group in ((keys.tickets, TICKETS_GROUP), (keys.rollouts, ROLLOUTS_GROUP)):
            Consumer(client, stream, group, "controller", budget_s=self.budget_s)  # creates stream and group
        self.manifests = Tail(client, keys.weights, budget_s=self.budget_s)
        self.fences: dict[str, str] = self._load_fences()
        self.seen: set[str] = set()
        self.responses = 0
        """Responses that live samplers have published: a step may take long while they come."""
        self.silent: dict[str, float] = {}
        """Last heartbeats (Unix time) of samplers that fell silent and have not come back."""
        self.progress_at = self.ticked_at = time.monotonic()
        self.answered: deque[bytes] = deque(maxlen=REPORTS_KEPT)
        self.stepped = False
        """A step was reported since this controller started: engines are up."""
        self.stopping = False
        self.lost: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        """(sampler, why) of samplers that are known to be gone."""

    # -- state ---------------------------------------------------------------------------------------------

    def _load_fences(self) -> dict[str, str]:
        raw = self._retry(lambda: self.client.hgetall(self.keys.fences), "reading fences")
        return {name.decode(): fence.decode() for name, fence in raw.items()}

    def _retry(self, call: Callable[[], Any], what: str) -> Any:
        return retrying(call, budget_s=self.budget_s, what=what)

    def _commit(self, state: ControllerState, effects: Callable[[Any], None] = lambda pipe: None) -> None:
        """Write effects and the new state in one MULTI, then hold the state."""

        def write() -> None:
            with self.client.pipeline(transaction=True) as pipe:
                for _ in range(WRITE_ATTEMPTS):
                    pipe.watch(self.keys.state)
                    term = int(cast(Any, pipe.hget(self.keys.state, TERM_FIELD)) or 0)
                    if term > self.term:
                        raise DeposedError(
                            f"controller {term} of this run has replaced this one ({self.term})"
                        )
                    pipe.multi()
                    effects(pipe)
                    pipe.hset(self.keys.state, STATE_FIELD, state.model_dump_json())
                    try:
                        pipe.execute()
                        return
                    except redis.WatchError:
                        continue  # another field changed: an epoch, a request for a resync
            raise redis.ConnectionError("the state changed under every attempt to write it")

        self._retry(write, "writing the state")
        self.state = state

    def _event(self, level: EventLevel, name: str, text: str, **data: object) -> None:
        log.log(logging.getLevelName(level.upper()), text)
        write_event(
            self.client,
            self.keys,
            level=level,
            source="controller",
            name=name,
            text=text,
            data=data,
            budget_s=self.budget_s,
        )

    # -- the loop ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the trainer reports that it finished, or `stopping` is set. Raises StalledError."""
        while not self.stopping and (self.stay or not self.state.finished):
            self.tick(block_s=0.2)
            self.ticked_at = time.monotonic()

    def tick(self, block_s: float = 0.0) -> None:
        """One pass; waits up to `block_s` for a report."""
        for entry in [*self._left_reports(), *self.reports.read(100, block_s)]:
            self._on_report(entry)
        for entry in self.manifests.read(block_s=None):
            self._on_manifest(entry)
        self._watch_samplers()
        for batch in plan_issue(self.state, self.config.sync.max_lead, self.config.trainer.steps):
            self._issue(batch)
        if self.checks:
            self.checks.poll(self.statuses())
        self._check_progress()

    def _left_reports(self) -> list[Entry]:
        """Reports that an older controller took and did not answer: at the start, and now and then, since it
        may have taken one while it was being replaced.
        """
        first, now_s = self.claimed_at < 0, time.monotonic()
        if now_s - self.claimed_at < CLAIM_EVERY_S:
            return []
        self.claimed_at = now_s
        return self.reports.claim_stale(0.0 if first else CLAIM_EVERY_S, 1000)

    def _on_report(self, entry: Entry) -> None:
        try:
            report = decode(Report, entry.fields).header
        except MessageError as exc:
            self._event("error", "bad_report", f"a report was refused: {exc}")
            self._commit(self.state, lambda pipe: self._queue_answered(pipe, entry))
            self._forget(entry)
            return
        self.progress_at = time.monotonic()
        if self.checks:
            self.checks.on_report(report)
        name = "verdict" if report.event == "step" else report.event
        attributes = {**messaging("process", self.keys.reports), "leeway.step": report.step}
        with span(name, attributes, kind="consumer", parent=report.traceparent):
            self._answer(entry, report)

    def _answer(self, entry: Entry, report: ReportHeader) -> None:
        verdict: Verdict | None = None
        state = self.state
        if report.event == "started":
            state = state.started(report)
            # Manifests of this epoch may stand before its report.
            self.manifests.last_id = "0"
        elif report.event == "resync_failed":
            state = state.kept(report)
        elif report.event == "finished" and report.epoch == state.epoch:
            state = state.model_copy(update={"finished": True})
        elif report.event == "step" and report.epoch == state.epoch and report.step >= state.next_step:
            self.stepped = True
            decision = self._decide(report)
            state = state.stepped(report, decision)
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
            if verdict is not None:
                add_fields(pipe, self.keys.verdicts, encode(verdict), maxlen=1000)
                if verdict.header.reason == "manual":
                    pipe.hdel(self.keys.state, MANUAL_FIELD)
            self._queue_answered(pipe, entry)

        self._commit(state, effects)
        self._forget(entry)

    def _queue_answered(self, pipe: Any, entry: Entry) -> None:
        """The report was answered; those before the last REPORTS_KEPT that were are needed by nobody."""
        self.reports.queue_ack(pipe, [entry.id], delete=False)
        if len(self.answered) == REPORTS_KEPT:
            pipe.xtrim(self.keys.reports, minid=self.answered[0], approximate=False)

    def _forget(self, entry: Entry) -> None:
        self.reports.forget([entry.id])
        self.answered.append(entry.id)

    def _decide(self, report: Any) -> Decision:
        manual = bool(
            self._retry(lambda: self.client.hexists(self.keys.state, MANUAL_FIELD), "reading state")
        )
        decision = decide(report, self.config.sync, self.config.trainer.steps, manual)
        if decision.reason:
            log.info("step %d: resync (%s)", report.step, decision.reason)
        return decision

    def _on_manifest(self, entry: Entry) -> None:
        manifest = parse_manifest(entry.fields)
        if self.checks:
            self.checks.on_manifest(manifest)
        state = self.state.published(manifest.epoch, manifest.version, manifest.step, now(), manifest.digest)
        if state is not self.state:
            self._commit(state)
            self.progress_at = time.monotonic()

    def statuses(self) -> list[SamplerStatus]:
        """The hash `samplers`, decoded."""
        return read_statuses(self.client, self.keys, budget_s=self.budget_s)

    def _remove(self, sampler: str) -> None:
        remove_status(self.client, self.keys, sampler, budget_s=self.budget_s)

    def _forget_lost(self) -> None:
        while not self.lost.empty():
            name, why = self.lost.get()
            if name in self.seen:
                self._event("warning", "sampler_lost", f"sampler {name}: {why}", sampler=name)
                self._remove(name)
                self.seen.discard(name)

    def _watch_samplers(self) -> None:
        self._forget_lost()
        live, silent = split_live(self.statuses(), now(), self.config.sync.ticket_idle_s)
        metrics.observe(self.state, live)
        responses = sum(status.tickets for status in live)
        if responses > self.responses:
            self.progress_at = time.monotonic()
        self.responses = responses
        for status in silent:
            self._event(
                "warning",
                "sampler_lost",
                f"sampler {status.sampler} gave no heartbeat for {now() - status.heartbeat:.0f} s "
                f"({status.inflight} responses in flight); its tickets go to other samplers",
                sampler=status.sampler,
            )
            self._remove(status.sampler)
            self._lift(status.sampler)
            self.seen.discard(status.sampler)
            self.silent[status.sampler] = status.heartbeat
        for status in live:
            self.silent.pop(status.sampler, None)
            if status.sampler not in self.seen:
                self.seen.add(status.sampler)
                self._event("info", "sampler_joined", f"sampler {status.sampler} joined")
        timeout_s = self.config.sync.commit_timeout_s
        attested = decide_commit(self.state, live, now(), timeout_s, self.fences)
        for name in attested.back:
            self._lift(name)
            self._event("info", "sampler_rejoined", f"sampler {name} loaded the weights afresh")
        for name in attested.wrong:
            self._fence(name, f"holds something else than version {self.state.pending or self.state.current}")
        if attested.commit:
            self._commit(self.state.committed())
            self.progress_at = time.monotonic()
            log.info(
                "version %s is current on %d samplers", self.state.current, len(live) - len(attested.late)
            )
            for name in attested.late:
                self._fence(name, f"did not attest version {self.state.current} within {timeout_s:g} s")

    def _fence(self, sampler: str, reason: str) -> None:
        """From now on the sampler takes no tickets, and lets go of its own, until it has rejoined."""
        fence = f"{self.state.epoch}.{self.state.pending or self.state.current}.{int(1000 * now())}"
        self._retry(lambda: self.client.hset(self.keys.fences, sampler, fence), "fencing a sampler")
        self.fences[sampler] = fence
        self._event(
            "warning",
            "sampler_fenced",
            f"sampler {sampler} {reason}: it gets no tickets until it has loaded the weights afresh",
            sampler=sampler,
        )

    def _lift(self, sampler: str) -> None:
        if self.fences.pop(sampler, None) is not None:
            self._retry(lambda: self.client.hdel(self.keys.fences, sampler), "lifting a fence")

    def _issue(self, batch: int) -> None:
        state = self.state
        attributes = {"leeway.batch": batch, "leeway.version": state.current, "leeway.epoch": state.epoch}
        with span("plan batch", attributes, root=True):
            self._write_tickets(batch)
        metrics.batch_issued()

    def _write_tickets(self, batch: int) -> None:
        config, state = self.config, self.state
        items = plan_batch(self.size, config.order_seed, batch, config.batch.prompts)
        assert state.current is not None
        tickets = plan_tickets(
            items,
            [self.encode_item(item) for item in items],
            seed=config.seed,
            epoch=state.epoch,
            version=state.current,
            batch=batch,
            group_size=config.batch.group_size,
            max_new_tokens=config.sampling.max_new_tokens,
        )

        tickets = [self._traced(ticket) for ticket in tickets]

        def effects(pipe: Any) -> None:
            for ticket in tickets:
                add_fields(pipe, self.keys.tickets, encode(ticket))

        self._commit(state.issued(batch), effects)
        log.debug("batch %d issued under version %d", batch, state.current)

    def _traced(self, ticket: Ticket) -> Ticket:
        """The ticket with the context of a span of its own, which everything done for it is below."""
        if not tracing():
            return ticket
        header = ticket.header
        attributes = {
            **messaging("send", self.keys.tickets, header.ticket_id),
            "leeway.batch": header.batch,
            "leeway.version": header.version,
        }
        with span("ticket", attributes, kind="producer"):
            return replace(ticket, header=header.model_copy(update={"traceparent": traceparent()}))

    def _check_progress(self) -> None:
        stalled, limit = time.monotonic() - self.progress_at, self.config.sync.stall_timeout_s
        start_s = self.config.sampler.start_timeout_s
        if not self.stepped:
            limit = max(limit, start_s)
        if self.state.finished or not is_stalled(self.client, self.keys, stalled, limit, start_s):
            return
        state = self.state
        names = ", ".join(
            f"{s.sampler} (version {s.version}, {s.inflight} in flight, "
            f"heartbeat {now() - s.heartbeat:.0f} s ago)"
            for s in self.statuses()
        )
        lost = ", ".join(
            f"{name} (last heartbeat {now() - beat:.0f} s ago)" for name, beat in self.silent.items()
        )
        awaited = (
            "the trainer's start"
            if state.epoch < 0
            else f"version {state.awaiting} from the trainer"
            if state.awaiting is not None
            else f"version {state.pending} to be attested"
            if state.pending is not None
            else f"the report of step {state.next_step}"
        )
        raise StalledError(
            f"no progress for {stalled:.0f} s: waiting for {awaited}; samplers: {names or 'none'}; "
            f"lost: {lost or 'none'}; {describe_tickets(self.client, self.keys)}"
        )
