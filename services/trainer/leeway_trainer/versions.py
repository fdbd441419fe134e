"""Weight versions of the trainer: what samplers hold, what theta_s holds, and the KL around a resync.

    UNPUBLISHED --start--> SETTLED --resync, with KL measured--> STRADDLING
         ^                 |    ^                                 |     |
         |                 |    `------------ open_batch ---------´     |
         `-- new_epoch ----+--------------------------------------------´

    move         from         to           does
    start        UNPUBLISHED  SETTLED      publish theta, theta_s := theta
    open_batch   SETTLED      SETTLED      -
                 STRADDLING   SETTLED      score the batch with the old weights, theta_s := theta, score again
    close_batch  SETTLED      SETTLED      (theta has changed)
    resync       SETTLED      SETTLED      publish theta, theta_s := theta
                 SETTLED      STRADDLING   KL is measured: score the last batch with both, publish theta
                 SETTLED      SETTLED      no room: nothing changes
                 STRADDLING   SETTLED      no batch came in between: theta_s := theta, then as above
    new_epoch    SETTLED      UNPUBLISHED  what was published is lost; also from STRADDLING

UNPUBLISHED   nothing of this run epoch is published
SETTLED       theta_s holds the version published last, which is what batches are drawn under
STRADDLING    a version is published and theta_s still holds the weights before it. theta must not change

Keeping the old weights in theta_s until the first fresh batch costs no memory, and lets that batch be scored
under both (leeway_trainer.prefixes). Every move is made by all ranks together; an illegal one raises
VersionsError and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from leeway.config import ChecksConfig
from leeway.errors import LeewayError
from leeway.messages import Rollout
from leeway.metrics.areas.resync import WEIGHTS_WIRE_BYTES
from leeway.metrics.areas.time import TIME_PREFIX_KL_S, TIME_PUBLISH_S
from leeway.weights import WeightManifest
from leeway_trainer.timing import StepTimes

if TYPE_CHECKING:
    from leeway_trainer.prefixes import ResyncKl
    from leeway_trainer.snapshot import Snapshot


class State(Enum):
    """See the module's docstring."""

    UNPUBLISHED = "unpublished"
    SETTLED = "settled"
    STRADDLING = "straddling"


class VersionsError(LeewayError):
    """A move that the state of the versions does not allow."""


class Publisher(Protocol):
    """What the moves need of a run epoch; `leeway_trainer.broadcast.Broadcaster` is one."""

    theta_s: Snapshot

    def publish(self, version: int, step: int) -> WeightManifest | None:
        """Publish theta. Raises WeightsTooLarge; nothing changes then."""

    def refresh(self, step: int) -> None:
        """Copy theta into theta_s."""


KlOf = Callable[[Sequence[Rollout]], "ResyncKl"]
"""Starts measuring KL on some responses."""


@dataclass(frozen=True)
class BatchWeights:
    """What a batch was drawn under."""

    version: int
    age: int
    """Optimiser steps done since that version was published."""
    theta_s: Snapshot
    """The weights of that version."""
    kl: dict[str, float | str] = field(default_factory=dict)
    """KL around the resync, when the batch is the first of its version and it is measured."""


def kl_is_due(step: int, measured_at: int | None, checks: ChecksConfig) -> bool:
    """Whether a resync after `step` optimiser steps is one to measure KL around."""
    if not checks.self_prefix_responses:
        return False
    return measured_at is None or step - measured_at >= checks.self_prefix_every


class Versions:
    """The versions of a run, and the only place that publishes them or changes theta_s.

    `version`: what `start` publishes; later the version published last, at step `published_at`.
    """

    def __init__(
        self,
        publisher: Publisher,
        kl_of: KlOf,
        checks: ChecksConfig,
        times: StepTimes,
        *,
        version: int,
        step: int,
    ) -> None:
        self.state = State.UNPUBLISHED
        self.version, self.published_at = version, step
        self._publisher, self._kl_of, self._checks, self._times = publisher, kl_of, checks, times
        self._last_batch: Sequence[Rollout] = ()
        self._measured_at: int | None = None
        self._kl_before: dict[str, float] = {}

    def age(self, step: int) -> int:
        """Optimiser steps, of `step` done, that what samplers hold is behind theta."""
        return step - self.published_at

    def start(self) -> None:
        """Publish theta as the first version of the run epoch."""
        self._require("start", State.UNPUBLISHED)
        self._publish(self.version, self.published_at, settle=True)

    def resync(self, step: int) -> None:
        """Publish theta as the next version.

        Raises WeightsTooLarge when there is no room for it; version and theta_s stay as they are then.
        """
        self._require("resync", State.SETTLED, State.STRADDLING)
        if self.state is State.STRADDLING:  # theta_s must hold what was published last
            with self._times.spend(TIME_PREFIX_KL_S):
                self._settle(self.published_at)
        measured = bool(self._last_batch) and kl_is_due(step, self._measured_at, self._checks)
        if measured:
            with self._times.spend(TIME_PREFIX_KL_S):
                self._kl_before = self._kl_of(self._last_batch).before()
            self._measured_at = step
        self._publish(self.version + 1, step, settle=not measured)

    def open_batch(self, step: int, rollouts: Sequence[Rollout]) -> BatchWeights:
        """The weights that the batch of optimiser step `step` was drawn under, before it is trained on.

        Raises VersionsError for a batch of another version than the one published last.
        """
        self._require("open_batch", State.SETTLED, State.STRADDLING)
        drawn = {rollout.header.version for rollout in rollouts}
        if drawn != {self.version}:
            raise VersionsError(
                f"step {step}: the batch was drawn under versions {sorted(drawn)}, expected {self.version}; "
                "theta_s of other versions is not held"
            )
        kl = self._measure_first_batch(rollouts) if self.state is State.STRADDLING else {}
        return BatchWeights(self.version, self.age(step), self._publisher.theta_s, kl)

    def close_batch(self, rollouts: Sequence[Rollout]) -> None:
        """theta was trained on the batch."""
        self._require("close_batch", State.SETTLED)
        self._last_batch = list(rollouts)

    def new_epoch(self, publisher: Publisher, step: int) -> None:
        """Nothing that was published is left: `start` publishes theta as the next version, at `step`."""
        self._require("new_epoch", State.SETTLED, State.STRADDLING)
        self.state = State.UNPUBLISHED
        self.version, self.published_at = self.version + 1, step
        self._publisher = publisher

    # -- parts of the moves --------------------------------------------------------------------------------

    def _require(self, move: str, *allowed: State) -> None:
        if self.state not in allowed:
            names = " or ".join(state.name for state in allowed)
            raise VersionsError(
                f"weights version {self.version}: {move} is not allowed in state {self.state.name}, "
                f"only in {names}"
            )

    def _publish(self, version: int, step: int, *, settle: bool) -> None:
        with self._times.spend(TIME_PUBLISH_S):
            manifest = self._publisher.publish(version, step)
            self.version, self.published_at = version, step
            self.state = State.STRADDLING
            if settle:
                self._settle(step)
        if manifest is not None:
            self._times.set(WEIGHTS_WIRE_BYTES, float(manifest.wire_nbytes))

    def _settle(self, step: int) -> None:
        self._publisher.refresh(step)
        self.state = State.SETTLED

    def _measure_first_batch(self, rollouts: Sequence[Rollout]) -> dict[str, float | str]:
        with self._times.spend(TIME_PREFIX_KL_S):
            kl = self._kl_of(rollouts)
            return {**self._kl_before, **kl.around(lambda: self._settle(self.published_at))}
