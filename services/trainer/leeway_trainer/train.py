"""The trainer's loop; docs/architecture.md ("One step") describes it from the outside.

start      begin a run epoch; load or resume; publish theta in full; report `started`
each step  take batch k -> theta_s scores it, theta trains on it with the correction -> report
           -> verdict -> on resync: publish theta as the next version -> checkpoint if due
lost       the server came back empty: a new run epoch under the same policy
end        last checkpoint, model in Hugging Face format, report `finished`

What the loop calls:

gates.py       waiting for rollouts and for a verdict
learner.py     theta, theta_s and one optimiser step on one batch
versions.py    what is published, and what theta_s holds
durability.py  checkpoints, and what may be deleted after them
reports.py     what the controller and the launcher are told
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from leeway.checkpoints.find import find_checkpoint
from leeway.checkpoints.state import TrainState
from leeway.config import RunConfig
from leeway.messages import Rollout
from leeway.metrics.areas.lag import LAG_ESS_SEQ, LAG_ESS_TOK
from leeway.metrics.areas.time import TIME_PUBLISH_S, TIME_WAIT_S
from leeway.telemetry.tracing import span
from leeway.weights import WeightsTooLarge
from leeway_trainer.broadcast import Broadcaster
from leeway_trainer.checkpoint import load_checkpoint
from leeway_trainer.durability import Durability, train_state
from leeway_trainer.epochs import RunEpoch, TrainerSetup, begin_epoch
from leeway_trainer.errors import StoppedError
from leeway_trainer.gates import Command, Gates, sync_facts
from leeway_trainer.learner import LoadLearner, load_learner
from leeway_trainer.prefixes import ResyncKl
from leeway_trainer.ranks import Ranks
from leeway_trainer.reports import Reports, check_rewards
from leeway_trainer.saved_batch import BatchInfo, save_batch
from leeway_trainer.timing import Metrics, StepTimes
from leeway_trainer.transports import find_transport
from leeway_trainer.transports.base import Link
from leeway_trainer.versions import Versions


class Trainer:
    """A trainer of one run. All ranks run the same code; rank 0 alone has a `feed`.

    gate          waits for                          unblocked by
    rollouts      all slots of batch k, drawn        samplers; a late request for a resync (publish, then wait
                  under the current version          again); a lost server (new run epoch); stop
    verdict       the controller's answer to the     the verdict; sync.verdict_timeout_s (the trainer applies
                  report of step k                   the same policy itself); stop
    micro-batch   nothing; looks for a stop          -
    Redis         each write and read                the server; redis.reconnect_s ends the trainer
    ranks         rank 0's decision at each gate     rank 0; the process group's timeout ends the trainer
    """

    def __init__(
        self, config: RunConfig, ranks: Ranks, setup: TrainerSetup, load: LoadLearner = load_learner
    ) -> None:
        self.config, self.ranks, self.setup = config, ranks, setup
        self.stopping = False
        """Set by a signal; the loop ends at the next gate or micro-batch."""
        self._lived_at = time.monotonic()
        self.on_start: Callable[[], object] = lambda: None
        """Called on every rank once the weights are published and training begins."""
        self.transport = find_transport(config, ranks)
        self.learner = load(config, ranks, setup)
        self.policy = self.learner.policy
        self.next_batch, version, last_epoch = 0, 0, -1
        if setup.resume is not None:
            state = load_checkpoint(find_checkpoint(setup.resume), self.policy)
            # The weights that the checkpoint's version names are gone; theta gets the number after it.
            self.next_batch, version, last_epoch = state.next_batch, state.version + 1, state.epoch
        self.times = StepTimes()
        self.reports = Reports(config, setup.keys, self.times)
        self.durability = Durability(config, setup, self.policy, self.times, saved=self.next_batch)
        publisher = self._begin_epoch(last_epoch, version)
        self.versions = Versions(
            publisher, self._kl_of, config.checks, self.times, version=version, step=self.next_batch
        )

    def seconds_since_progress(self) -> float:
        """Seconds since this rank's loop came by a gate or a micro-batch, for the liveness probe."""
        return time.monotonic() - self._lived_at

    # -- the loop ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until trainer.steps. Raises StoppedError, StalledError, NonFiniteError and other
        LeewayErrors.
        """
        self._start_epoch()
        self.on_start()
        while self.next_batch < self.config.trainer.steps:
            step, began = self.next_batch, time.monotonic()
            rollouts = self.next_rollouts()
            with span("step", self._step_attributes(step), root=True, began=began) as opened:
                with span("assemble", links=[r.header.traceparent for r in rollouts], began=began):
                    check_rewards(rollouts, step)
                metrics = self.train(step, rollouts)
                age = self.versions.age(self.next_batch)
                if self.gates.resync_wanted(sync_facts(metrics, step, age, self.config)):
                    self.resync()
                self.durability.save_if_due(self._state(), self.epoch.feed)
                if opened is not None:
                    opened.set_attributes(
                        {"leeway.ess_tok": metrics[LAG_ESS_TOK], "leeway.ess_seq": metrics[LAG_ESS_SEQ]}
                    )
        self.durability.finish(self._state(), self.epoch.feed)
        self._report("finished", self.next_batch)

    def next_rollouts(self) -> list[Rollout]:
        """Batch `next_batch`, on every rank; requests that arrive while waiting are served."""
        started, published_s = time.monotonic(), self.times.spent(TIME_PUBLISH_S)
        while (command := self.gates.next_command(self.next_batch)) is not Command.TRAIN:
            match command:
                case Command.STOP:
                    raise StoppedError("the trainer was told to stop while waiting for rollouts")
                case Command.RESYNC:
                    self.resync()
                case Command.NEW_EPOCH:
                    self.renew_epoch()
        rollouts = self.gates.take()
        published_s -= self.times.spent(TIME_PUBLISH_S)
        self.times.set(TIME_WAIT_S, time.monotonic() - started + published_s)
        return rollouts

    def train(self, step: int, rollouts: Sequence[Rollout]) -> Metrics:
        """Train theta on batch `step` and report."""
        drawn = self.versions.open_batch(step, rollouts)
        if step in self.config.output.save_batches:
            info = BatchInfo(step=step, age=drawn.age, version=drawn.version)
            where = self.setup.out / "batches"
            save_batch(where, self.policy, drawn.theta_s, rollouts, self.config, info)
        metrics = self.learner.step(
            self.policy, drawn.theta_s, rollouts, self.config, step, self._stop_if_asked, drawn.age
        )
        self.next_batch = step + 1
        self.versions.close_batch(rollouts)
        self._report("step", step, self.reports.of_step(metrics, step, rollouts, drawn, self.epoch))
        return metrics

    def resync(self) -> None:
        """Publish theta as the next version, which becomes theta_s; rollouts of the old one are void.

        Without room for it in Redis nothing changes, and the run is told.
        """
        try:
            self.versions.resync(self.next_batch)
        except WeightsTooLarge as exc:
            if self.epoch.feed:
                text = f"samplers keep version {self.versions.version}: {exc}"
                self.epoch.feed.event("error", "resync_failed", text)
            self._report("resync_failed", self.next_batch)
        else:
            if self.epoch.feed:
                self.epoch.feed.renew(self.versions.version)
        self.gates.answered = self.next_batch

    def renew_epoch(self) -> None:
        """What was in flight is lost: begin a new run epoch with the policy as it is."""
        lost = self.epoch
        self.reports.repeat_last_step(lost)
        publisher = self._begin_epoch(lost.number, self.versions.version + 1)
        self.versions.new_epoch(publisher, self.next_batch)
        self._start_epoch()
        if self.epoch.feed:
            text = (
                f"what was in flight of epoch {lost.number} was lost; batch {self.next_batch} is generated "
                f"again as epoch {self.epoch.number}"
            )
            self.epoch.feed.event("warning", "streams_lost", text)

    # -- parts ---------------------------------------------------------------------------------------------

    def _begin_epoch(self, last: int, version: int) -> Broadcaster:
        self.epoch: RunEpoch = begin_epoch(
            self.setup, self.config, self.ranks, last=last, version=version, batch=self.next_batch
        )
        link = Link(self.config, self.ranks, self.setup.client, self.setup.keys, self.epoch.number)
        publisher = Broadcaster(self.transport, link, self.policy, self.learner.theta_s)
        self.gates = Gates(
            self.config,
            self.ranks,
            self.epoch,
            self.times,
            stopping=self._asked_to_stop,
            keyframe_wanted=publisher.keyframe_wanted,
            repeat_report=lambda: self.reports.repeat_last(self.epoch),
        )
        return publisher

    def _start_epoch(self) -> None:
        self.versions.start()
        self._report("started", self.next_batch)

    def _kl_of(self, rollouts: Sequence[Rollout]) -> ResyncKl:
        return self.learner.kl(self.policy, self.learner.theta_s, rollouts, self.config)

    def _asked_to_stop(self) -> bool:
        self._lived_at = time.monotonic()
        return self.stopping

    def _stop_if_asked(self) -> None:
        if self.ranks.share_int(int(self._asked_to_stop())):
            raise StoppedError(f"the trainer was told to stop; step {self.next_batch} is abandoned")

    def _step_attributes(self, step: int) -> dict[str, str | int]:
        return {
            "leeway.step": step,
            "leeway.epoch": self.epoch.number,
            "leeway.version": self.versions.version,
            "leeway.method": self.config.correction.method,
            "leeway.age": self.versions.age(step),
        }

    def _state(self) -> TrainState:
        return train_state(self.config, self.versions, self.epoch, self.next_batch)

    def _report(self, event: str, step: int, metrics: Mapping[str, float | str] | None = None) -> None:
        version, age = self.versions.version, self.versions.age(self.next_batch)
        self.reports.write(event, self.epoch, step=step, version=version, age=age, metrics=metrics)
