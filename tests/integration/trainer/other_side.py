"""The other side of the streams, made up: what controller and samplers would write, driven by the test's
thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import redis
from trainer_support import make_rollout

from leeway.config import RunConfig
from leeway.config.identity import identify
from leeway.messages import Report, ReportHeader, Rollout, Verdict, VerdictHeader, decode
from leeway.policies import decide_resync, read_facts
from leeway.streams import Keys, Tail, append
from leeway.weights import WeightManifest, parse_manifest

Edit = Callable[[Rollout], list[Rollout]]


class OtherSide:
    """Answers every manifest with the rollouts of the next batch, and every report with a verdict.

    `verdicts` False: the controller is silent. `edit` turns each rollout into those that are written.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        config: RunConfig,
        *,
        verdicts: bool = True,
        edit: Edit | None = None,
    ) -> None:
        self.client, self.keys, self.config = client, keys, config
        self.digest = identify(config).digest
        self.verdicts, self.edit = verdicts, edit or (lambda rollout: [rollout])
        self.reports: list[ReportHeader] = []
        self.manifests: list[WeightManifest] = []
        self.awaiting = (-1, -1)
        """(epoch, version) that the next batch is drawn under."""
        self.hold = threading.Event()
        self._reports = Tail(client, keys.reports)
        self._manifests = Tail(client, keys.weights)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> OtherSide:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def steps(self) -> list[ReportHeader]:
        return [r for r in self.reports if r.event == "step"]

    def wait_for(self, what: Callable[[], bool], budget_s: float = 60.0) -> None:
        deadline = time.monotonic() + budget_s
        while not what():
            assert self._thread.is_alive(), "the other side died; see its traceback"
            assert time.monotonic() < deadline, f"did not happen within {budget_s} s; {self.reports=}"
            time.sleep(0.02)

    def _run(self) -> None:
        while not self._stop.is_set():
            for entry in self._reports.read(block_s=0.02):
                self._on_report(decode(Report, entry.fields).header)
            for entry in self._manifests.read(block_s=None):
                manifest = parse_manifest(entry.fields)
                self.manifests.append(manifest)
                if (manifest.epoch, manifest.version) >= self.awaiting:
                    self._generate(manifest.step, manifest.epoch, manifest.version)

    def _on_report(self, report: ReportHeader) -> None:
        self.reports.append(report)
        if report.event == "resync_failed":
            self.awaiting = (-1, -1)
            self._generate(report.step, report.epoch, report.version)
        if report.event != "step":
            return
        last = report.step + 1 >= self.config.trainer.steps
        facts = read_facts(report.metrics, step=report.step, age=report.age, last=last)
        decision = decide_resync(facts, self.config.sync)
        if self.verdicts:
            header = VerdictHeader(
                epoch=report.epoch, step=report.step, action=decision.action, reason=decision.reason
            )
            append(self.client, self.keys.verdicts, Verdict(header))
        if decision.reason:
            self.awaiting = (report.epoch, report.version + 1)
        elif not last:
            self._generate(report.step + 1, report.epoch, report.version)

    def _generate(self, batch: int, epoch: int, version: int) -> None:
        if self.hold.is_set():
            return
        for group in reversed(range(self.config.batch.prompts)):
            for index in range(self.config.batch.group_size):
                made = make_rollout(batch, group, index, epoch=epoch, version=version, config=self.digest)
                for rollout in self.edit(made):
                    append(self.client, self.keys.rollouts, rollout)
