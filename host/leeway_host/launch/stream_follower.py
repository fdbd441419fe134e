"""Follows a run's streams: reports, verdicts, events and heartbeats, into its files and its view."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import redis

from leeway.config.load import dump_config
from leeway.events import EventTail
from leeway.messages import Report, ReportHeader, SamplerStatus, Verdict, VerdictHeader, decode
from leeway.metrics.areas.reward import REWARD_ERROR, REWARD_ERRORS
from leeway.statuses import read_statuses
from leeway.streams import SCALE_FIELD, Keys, Tail, retrying
from leeway_host.launch.checks import CheckFile
from leeway_host.launch.claims import CONFIG_FILE
from leeway_host.launch.history import is_repeat
from leeway_host.launch.record import Recorder, write_atomic
from leeway_host.launch.table import View

MAX_ENTRIES = 1000
MAX_REWARD_ERRORS = 5
"""Different reward errors that are shown."""


class Follower:
    """Reads what is new in a run's streams, each call of `update` within a few times `budget_s`.

    `on_report` is called with every report once, including those of steps that are trained again later.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        recorder: Recorder,
        view: View,
        checks: CheckFile,
        on_report: Callable[[ReportHeader], None],
        *,
        budget_s: float,
    ) -> None:
        self.client, self.keys, self.budget_s = client, keys, budget_s
        self.recorder, self.view, self.checks, self.on_report = recorder, view, checks, on_report
        self.statuses: list[SamplerStatus] = []
        """Last heartbeat of each sampler."""
        self.progress_at = time.monotonic()
        """When the last report was read."""
        self._reports = Tail(client, keys.reports, budget_s=budget_s)
        self._verdicts = Tail(client, keys.verdicts, budget_s=budget_s)
        self._events = EventTail(client, keys, budget_s=budget_s)
        self._new_reports: deque[ReportHeader] = deque()
        self._new_verdicts: list[VerdictHeader] = []
        """Verdicts on reports that were not taken yet."""
        self._last_report: ReportHeader | None = None
        self._reward_errors: set[str] = set()

    def update(self) -> None:
        """Read everything new. Raises RedisUnavailable when the server does not answer."""
        self.statuses = read_statuses(self.client, self.keys, budget_s=self.budget_s)
        self.recorder.samplers.update(self.statuses)
        self.checks.update(budget_s=self.budget_s)
        self.recorder.check_counts = self.checks.counts()
        self._read_events()
        # Kept before anything else is read: the server may go away, and no entry that was read may be lost.
        # Reports first: the trainer awaits a step's verdict before it reports the next step, so that the
        # verdicts read now include those on all reports but the last.
        for entry in self._reports.read(count=MAX_ENTRIES, block_s=None):
            self._new_reports.append(decode(Report, entry.fields).header)
        for entry in self._verdicts.read(count=MAX_ENTRIES, block_s=None):
            self._new_verdicts.append(decode(Verdict, entry.fields).header)
        self._take_verdicts()
        while self._new_reports:
            self._take_report(self._new_reports.popleft())
            self._take_verdicts()

    def wanted_samplers(self, default: int) -> int:
        """The number that `leeway scale samplers` asked for last, `default` if it never did."""
        raw: Any = retrying(
            lambda: self.client.hget(self.keys.requests, SCALE_FIELD),
            budget_s=self.budget_s,
            what="reading the scale",
        )
        return int(raw) if raw else default

    def describe(self) -> str:
        """What the run is doing, in a few words."""
        if self.recorder.steps:
            inflight = sum(status.inflight for status in self.statuses)
            return f"training; {len(self.statuses)} samplers, {inflight} in flight"
        if any(status.ready for status in self.statuses):
            return "generating and training the first batch"
        return "starting the engines"

    def _read_events(self) -> None:
        for event in self._events.read():
            if event.level != "info":
                self.view.note(f"{event.source}: {event.text}")

    def _take_report(self, report: ReportHeader) -> None:
        if is_repeat(self._last_report, report):
            return
        self._last_report, self.progress_at = report, time.monotonic()
        self.on_report(report)
        now_at = (report.epoch, report.step)
        self._new_verdicts = [v for v in self._new_verdicts if (v.epoch, v.step) >= now_at]
        if report.event == "started":
            write_atomic(self.recorder.out / CONFIG_FILE, dump_config(self.recorder.config))
            self.recorder.started(report.step)
        elif report.event == "step":
            self.recorder.step(report)
            self._note_reward_errors(report)

    def _take_verdicts(self) -> None:
        """Show the row that awaits its verdict, if that is among the new ones."""
        for verdict in self._new_verdicts:
            row = self.recorder.verdict(verdict)
            if row is not None:
                self._new_verdicts.remove(verdict)
                self.view.row(row)
                return

    def _note_reward_errors(self, report: ReportHeader) -> None:
        text = str(report.metrics.get(REWARD_ERROR) or "")
        seen = self._reward_errors
        if text and text not in seen and len(seen) < MAX_REWARD_ERRORS:
            seen.add(text)
            count = int(float(report.metrics.get(REWARD_ERRORS) or 0))
            self.view.note(
                f"step {report.step + 1}: {count} responses could not be scored, for example: {text}"
            )
