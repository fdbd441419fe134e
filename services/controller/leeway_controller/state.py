"""What the controller knows, and how each message changes it: pure transitions.

started ------> a new run epoch without a version; nothing is issued
manifest -----> pending = the newer version; issuing stops
attested -----> current = pending; unfinished batches are issued again under it
step ---------> verdict; after a resync verdict issuing stops until the new version is current
resync_failed > issuing continues under the old version
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

from leeway.config import SyncConfig
from leeway.messages import ReportHeader, SamplerStatus
from leeway.policies import Decision, decide_resync, read_facts
from leeway.run_state import RunState


class ControllerState(RunState):
    """The state of the run, and how each message changes it."""

    def started(self, report: ReportHeader) -> Self:
        """The trainer has (re)started: everything of older epochs is void."""
        if report.epoch <= self.epoch:  # repeated, or of a trainer that was replaced
            return self
        return type(self)(
            epoch=report.epoch, config=report.config, next_step=report.step, next_issue=report.step
        )

    def published(self, epoch: int, version: int, step: int, at: float, digest: str = "") -> Self:
        """A manifest: batches from `step` on are drawn under `version`."""
        if epoch != self.epoch or version <= self.newest:
            return self
        change: dict[str, object] = {"pending": version, "pending_since": at, "digest": digest}
        change["next_issue"] = max(step, self.next_step)
        if self.awaiting is not None and version >= self.awaiting:
            change["awaiting"] = None
        return self.model_copy(update=change)

    def committed(self) -> Self:
        """Enough samplers have attested the pending version: it is current."""
        return self.model_copy(update={"current": self.pending, "pending": None})

    def stepped(self, report: ReportHeader, decision: Decision) -> Self:
        """Batch `report.step` was trained, and `decision` is the verdict on it."""
        if report.epoch != self.epoch or report.step < self.next_step:
            return self
        change: dict[str, int | None] = {"next_step": report.step + 1}
        # A trainer that had no verdict in time may have published it already.
        if decision.action == "resync" and report.version + 1 > self.newest:
            change["awaiting"] = report.version + 1
        return self.model_copy(update=change)

    def kept(self, report: ReportHeader) -> Self:
        """The trainer could not publish the requested version: the old one stays current."""
        if report.epoch != self.epoch or report.step < self.next_step:  # repeated
            return self
        return self.model_copy(update={"awaiting": None})

    def ended(self, report: ReportHeader) -> Self:
        """The trainer has finished the run."""
        return self.model_copy(update={"finished": True}) if report.epoch == self.epoch else self

    def reissued(self) -> Self:
        """Tickets that were written may be lost: those of all batches that are not trained are due again."""
        return self.model_copy(update={"next_issue": self.next_step})

    def issued(self, batch: int) -> Self:
        """The tickets of `batch` are written."""
        return self.model_copy(update={"next_issue": batch + 1})


def decide(report: ReportHeader, sync: SyncConfig, steps: int, manual: bool) -> Decision:
    """The verdict on a step report. Raises PolicyError for a metric that is missing or not a number."""
    last = report.step + 1 >= steps
    facts = read_facts(report.metrics, step=report.step, age=report.age, last=last, manual=manual)
    return decide_resync(facts, sync)


def plan_issue(state: ControllerState, max_lead: int, steps: int, config: str = "") -> list[int]:
    """Batches to issue now: at most `max_lead` ahead of the trainer, none while a new version is awaited.

    None either while the trainer has another configuration than `config`, the digest of the controller's.
    """
    if state.config != config:
        return []
    if state.current is None or state.pending is not None or state.awaiting is not None or state.finished:
        return []
    return list(range(state.next_issue, min(state.next_step + max_lead + 1, steps)))


@dataclass(frozen=True)
class Attested:
    """What live samplers attest of the newest version. The lists hold names of samplers."""

    commit: bool = False
    """It becomes current now."""
    late: list[str] = field(default_factory=list)
    """Did not attest it in time; to be fenced."""
    wrong: list[str] = field(default_factory=list)
    """Attest its number with another digest; to be fenced."""
    back: list[str] = field(default_factory=list)
    """Were fenced, and have reloaded it."""


def decide_commit(
    state: ControllerState,
    live: Iterable[SamplerStatus],
    at: float,
    timeout_s: float,
    fences: Mapping[str, str] = MappingProxyType({}),
) -> Attested:
    """Which samplers hold the newest version, and whether it becomes current.

    It does when every live sampler that is not fenced (`fences`: name -> fence) attests the digest of the
    pending version; after `timeout_s` when at least one does, and the others are to be fenced. A fenced
    sampler counts again once it has passed its fence. `at`: Unix time.
    """
    newest = state.current if state.pending is None else state.pending
    if newest is None:
        return Attested()
    right: list[str] = []
    wrong: list[str] = []
    missing: list[str] = []
    back: list[str] = []
    for status in live:
        holds = (status.epoch, status.version) == (state.epoch, newest)
        if holds and status.digest != state.digest:
            wrong.append(status.sampler)
        elif status.sampler in fences:
            if holds and status.passed == fences[status.sampler]:
                back.append(status.sampler)
        else:
            (right if holds else missing).append(status.sampler)
    late = at - state.pending_since >= timeout_s
    commit = state.pending is not None and bool(right or back) and (late or not missing)
    return Attested(
        commit=commit,
        late=missing if commit else [],
        wrong=[name for name in wrong if name not in fences],
        back=back,
    )
