"""When a checkpoint is due, and what becomes durable with it.

Rollouts that were trained stay in Redis until a checkpoint holds their effect; then they are acknowledged and
deleted. Without checkpoints (trainer.checkpoint_every=0) they are acknowledged after every step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from leeway.checkpoints.state import CHECKPOINTS, TrainState
from leeway.config import RunConfig
from leeway.errors import LeewayError
from leeway.metrics.areas.redis import REDIS_MEMORY_FRACTION, REDIS_MEMORY_MIB
from leeway.metrics.areas.time import TIME_CHECKPOINT_S
from leeway.telemetry.tracing import span
from leeway_trainer.checkpoint import save_checkpoint
from leeway_trainer.export import export_model
from leeway_trainer.feed import PRESSURE, Feed
from leeway_trainer.timing import StepTimes

if TYPE_CHECKING:
    from leeway_trainer.epochs import RunEpoch, TrainerSetup
    from leeway_trainer.policy import Policy
    from leeway_trainer.versions import Versions

log = logging.getLogger(__name__)


def train_state(config: RunConfig, versions: Versions, epoch: RunEpoch, next_batch: int) -> TrainState:
    """What a trainer that resumes after `next_batch` steps must know."""
    trainer = config.trainer
    return TrainState(
        next_batch=next_batch,
        version=versions.version,
        published_at=versions.published_at,
        epoch=epoch.number,
        ranks=trainer.ranks,
        zero_stage=trainer.zero_stage,
        dtype=trainer.dtype,
        model=config.model.name,
    )


class ExportError(LeewayError):
    """The model of a finished run could not be written; its last checkpoint holds it."""


class Durability:
    """Checkpoints of a run. Every method is called by all ranks; only rank 0 passes a `feed`.

    `saved`: optimiser steps that the newest checkpoint holds.
    """

    def __init__(
        self, config: RunConfig, setup: TrainerSetup, policy: Policy, times: StepTimes, *, saved: int
    ) -> None:
        self.config, self.setup, self.policy, self.times = config, setup, policy, times
        self.saved = saved

    def save_if_due(self, state: TrainState, feed: Feed | None) -> None:
        """Checkpoint every trainer.checkpoint_every steps, and when Redis fills up with trained rollouts."""
        every, full = self.config.trainer.checkpoint_every, self._server_fills_up(feed)
        if every and (state.next_batch % every == 0 or full):
            self.save(state, feed)
        elif not every and feed is not None:
            feed.durable()

    def save(self, state: TrainState, feed: Feed | None) -> None:
        """Write a checkpoint, then acknowledge the rollouts that it contains."""
        with self.times.spend(TIME_CHECKPOINT_S), span("checkpoint", {"leeway.step": state.next_batch}):
            directory, keep = self.setup.out / CHECKPOINTS, self.config.trainer.keep_checkpoints
            # On a volume that both can write, a trainer that was replaced must not move `latest`.
            check = feed.check_newest if feed is not None else lambda: None
            path = save_checkpoint(directory, self.policy, state, keep, check)
            if feed is not None:
                feed.durable()
        self.saved = state.next_batch
        log.info("checkpoint %s", path)

    def finish(self, state: TrainState, feed: Feed | None) -> None:
        """The last checkpoint (unless it was just written), and the model in Hugging Face format.

        Raises ExportError: the run is complete but for the export, and nothing is lost.
        """
        if self.saved != state.next_batch:
            self.save(state, feed)
        if not self.config.output.save_model:
            return
        out = self.setup.out
        try:
            export_model(out / "model", self.policy, step=state.next_batch)
        except (OSError, RuntimeError, ValueError) as error:
            raise ExportError(
                f"all {state.next_batch} steps are done and in a checkpoint, but {out / 'model'} cannot be "
                f"written: {type(error).__name__}: {error}; then: leeway export {out}"
            ) from error

    def _server_fills_up(self, feed: Feed | None) -> bool:
        full = False
        if feed is not None:
            memory = feed.memory()
            full = memory.fraction > PRESSURE
            self.times.set(REDIS_MEMORY_MIB, memory.used / 2**20)
            self.times.set(REDIS_MEMORY_FRACTION, memory.fraction)
            if full:
                log.warning(
                    "Redis uses %.0f%% of its memory: checkpoint now, to delete rollouts that were trained",
                    100 * memory.fraction,
                )
        return bool(self.policy.ranks.share_int(int(full)))
