"""The trainer's loop.

start      a new run epoch; load or resume; publish the weights in full; report `started`
each step  assemble batch k -> theta_s scores it, theta trains on it with the correction -> report
           -> verdict (or our own, when none comes in time) -> on resync: publish version + 1
           -> every n steps, or when the server fills up: checkpoint, then acknowledge what it contains
server came back empty -> a new run epoch under the same policy
end        last checkpoint, model in Hugging Face format, report `finished`
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import redis

from leeway.batches import prompts_digest, tickets_digest
from leeway.checks.facts import trained_facts
from leeway.config import RunConfig
from leeway.errors import EXIT_INTERRUPTED, LeewayError
from leeway.messages import ReportHeader, Rollout, pack, unpack
from leeway.policies import SyncFacts, decide_resync, read_facts
from leeway.streams import EPOCH_FIELD, Keys, retrying
from leeway.telemetry.tracing import add_link, messaging, span, traceparent
from leeway.weights import WeightsTooLarge
from leeway_trainer.broadcast import Broadcaster
from leeway_trainer.checkpoint import (
    TrainState,
    export_model,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from leeway_trainer.feed import PRESSURE, Feed, StreamsLostError
from leeway_trainer.metrics import observe
from leeway_trainer.model import DTYPES, load_policy_model
from leeway_trainer.policy import Policy
from leeway_trainer.prefixes import PrefixScores, kl_estimate, self_prefix_metrics
from leeway_trainer.ranks import Ranks
from leeway_trainer.saved_batch import BatchInfo, save_batch
from leeway_trainer.snapshot import Snapshot
from leeway_trainer.step import Metrics, train_step

log = logging.getLogger(__name__)
STOP, TRAIN, RESYNC, RENEW = 0, 1, 2, 3


class RewardsFailedError(LeewayError):
    """Not one response of a batch could be scored."""


def check_rewards(rollouts: Sequence[Rollout], step: int) -> None:
    """Raise RewardsFailedError when the reward failed on every response: there is nothing to learn from."""
    errors = [r.header.reward_error for r in rollouts]
    if all(errors):
        raise RewardsFailedError(
            f"step {step}: the reward failed on all {len(errors)} responses, first with: {errors[0]}; "
            "check task.reward and task.reward_timeout_s"
        )


class StoppedError(LeewayError):
    """SIGTERM or Ctrl-C: the step in hand is abandoned."""

    exit_code = EXIT_INTERRUPTED


@dataclass(frozen=True)
class Place:
    """Where a trainer runs: model directory, output directory, and (rank 0 only) the run's Redis."""

    model: str
    out: Path
    keys: Keys
    client: redis.Redis | None
    resume: Path | None = None


class Trainer:
    """One run epoch of the trainer. All ranks run the same code; rank 0 alone has a `feed`."""

    def __init__(self, config: RunConfig, ranks: Ranks, place: Place) -> None:
        self.config, self.ranks, self.place = config, ranks, place
        self.stopping = False
        self.on_start: Callable[[], object] = lambda: None
        """Called on every rank once the weights are published and training begins."""
        model = load_policy_model(
            place.model,
            dtype=DTYPES[config.trainer.dtype],
            chunk_tokens=config.trainer.logits_chunk_tokens,
            trust_remote_code=config.model.trust_remote_code,
        )
        self.snapshot = Snapshot(copy.deepcopy(model), config.trainer, ranks)
        self.policy = Policy(model, config.trainer, ranks)
        self.next_batch, self.version = 0, 0
        last_epoch = -1
        if place.resume is not None:
            state = load_checkpoint(find_checkpoint(place.resume), self.policy)
            # The samplers' weights of the checkpoint's version are gone; theta gets a number of its own.
            self.next_batch, self.version, last_epoch = state.next_batch, state.version + 1, state.epoch
        self.published_at = self.first_batch = self.checkpointed = self.next_batch
        self.answered = self.next_batch
        """Resyncs that were asked for before this batch are done, or could not be."""
        self._begin_epoch(last_epoch)
        self.last_batch: list[Rollout] = []
        self.theta_s_is_old = False
        """theta_s still holds the weights before the last resync, to score the first fresh batch with."""
        self.prefix_kl: Metrics = {}
        self.prefix_kl_at: int | None = None
        self.last_step: ReportHeader | None = None
        self.times: Metrics = {}
        self.mark = time.monotonic()

    # -- the loop --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until trainer.steps. Raises StoppedError, StalledError, NonFiniteError and other
        LeewayErrors.
        """
        self.publish(self.version)
        self._report("started", self.next_batch)
        self.on_start()
        while self.next_batch < self.config.trainer.steps:
            step, began = self.next_batch, time.monotonic()
            rollouts = self.next_rollouts()
            attributes = {
                "leeway.step": step,
                "leeway.epoch": self.epoch,
                "leeway.version": self.version,
                "leeway.method": self.config.correction.method,
                "leeway.age": step - self.published_at,
            }
            with span("step", attributes, root=True, began=began) as opened:
                with span("assemble", links=[r.header.traceparent for r in rollouts], began=began):
                    check_rewards(rollouts, step)
                metrics = self.step(step, rollouts)
                if opened is not None:
                    opened.set_attributes(
                        {f"leeway.{n}": metrics[f"lag/{n}"] for n in ("ess_tok", "ess_seq")}
                    )
        self.finish()

    def step(self, step: int, rollouts: Sequence[Rollout]) -> Metrics:
        """Train batch `step` and do what follows: report, verdict, resync, checkpoint."""
        age = step - self.published_at
        around = self.renew_snapshot(rollouts)
        if step in self.config.output.save_batches:
            info = BatchInfo(step=step, age=age, version=self.version)
            where = self.place.out / "batches"
            save_batch(where, self.policy, self.snapshot, rollouts, self.config, info)
        metrics = train_step(self.policy, self.snapshot, rollouts, self.config, step, self._pause, age)
        self.next_batch = step + 1
        self.last_batch = list(rollouts)
        labels = {
            "batch/digest": prompts_digest(r.prompt_ids for r in rollouts),
            "batch/tickets": tickets_digest(r.header.ticket_id for r in rollouts),
            **trained_facts(rollouts, self.config.batch, step),
            **around,
        }
        if error := next((r.header.reward_error for r in rollouts if r.header.reward_error), None):
            labels["reward/error"] = error[:200]
        self._report("step", step, {**self._with_times(metrics, step), **labels})
        if self.resync_wanted(metrics, step):
            self.resync()
        self.checkpoint_if_due()
        return metrics

    def next_rollouts(self) -> list[Rollout]:
        """Batch `next_batch` in full, on every rank; resyncs that are asked for meanwhile are done."""
        started, published_s = time.monotonic(), self.times.get("time/publish_s", 0.0)
        while True:
            command = self.ranks.share_int(self._next_command())
            if command == STOP:
                raise StoppedError("the trainer was told to stop while waiting for rollouts")
            if command == RESYNC:
                self.resync()
                continue
            if command == RENEW:
                self.renew_epoch()
                continue
            rollouts = self.feed.take() if self.feed else []
            if self.ranks.size > 1:
                rollouts = unpack(self.ranks.share_bytes(pack(rollouts)))
            published_s -= self.times.get("time/publish_s", 0.0)
            self.times["time/wait_s"] = time.monotonic() - started + published_s
            return rollouts

    def resync_wanted(self, metrics: Metrics, step: int) -> bool:
        """The controller's verdict on `step`; without one in time, the same policy applied here."""
        wanted = False
        if self.feed and step + 1 < self.config.trainer.steps and not self.stopping:
            started = time.monotonic()
            with span("await verdict") as opened:
                verdict = self.feed.verdicts.wait(step, self.config.sync.verdict_timeout_s, self._stop_asked)
                if verdict is not None:
                    add_link(opened, verdict.traceparent)
            self.times["time/verdict_s"] = time.monotonic() - started
            # Also a resync that was asked for earlier and came too late then.
            wanted = self.feed.verdicts.resync_since(self.answered) is not None
            if verdict is None and not self.stopping:
                wanted = (
                    wanted or decide_resync(self._facts(metrics, step), self.config.sync).reason is not None
                )
                self.times["verdict/self"] = 1.0
                log.warning("step %d: no verdict in time, decided alone: resync=%s", step, wanted)
        return bool(self.ranks.share_int(int(wanted)))

    def resync(self) -> None:
        """Publish the current weights as the next version; they become theta_s.

        When Redis has no room for them, everything stays as it is, and the run is told so.
        """
        self.renew_snapshot()  # a delta is made against what was published last
        keep_old = self.prefix_kl_due()
        try:
            self.publish(self.version + 1, keep_old=keep_old)
        except WeightsTooLarge as exc:
            self.answered = self.next_batch
            if self.feed:
                self.feed.event("error", "resync_failed", f"samplers keep version {self.version}: {exc}")
            self._report("resync_failed", self.next_batch)
            return
        self.version += 1
        self.published_at = self.answered = self.next_batch
        if self.feed:
            self.feed.renew(self.version)

    def renew_epoch(self) -> None:
        """The server lost everything: start a new run epoch with the policy as it is."""
        lost = f"the server lost what was in flight of epoch {self.epoch}; batch {self.next_batch} is"
        self.version += 1
        self.published_at = self.answered = self.first_batch = self.next_batch
        if self.feed and self.last_step is not None:
            self.feed.report(self.last_step)  # perhaps nobody read it; a reader that did drops it
        self._begin_epoch(self.epoch)
        self.publish(self.version)
        self._report("started", self.next_batch)
        if self.feed:
            text = f"{lost} generated again as epoch {self.epoch}"
            self.feed.event("warning", "streams_lost", text)

    def prefix_kl_due(self) -> bool:
        """Whether the resync at hand is one to measure KL around; if so, its first half is measured."""
        checks = self.config.checks
        since = self.next_batch - (self.prefix_kl_at if self.prefix_kl_at is not None else -(10**9))
        if not self.last_batch or not checks.self_prefix_responses or since < checks.self_prefix_every:
            return False
        started = time.monotonic()
        scores = PrefixScores(self.policy, self.last_batch, self.config)
        old, new = scores.score(self.snapshot.score), scores.score(self.policy.score)
        self.prefix_kl = {"kl/sampler_prefix": kl_estimate(old, new, scores.reported()[1])[0]}
        self.prefix_kl_at = self.next_batch
        self.times["time/prefix_kl_s"] = time.monotonic() - started
        return True

    def renew_snapshot(self, fresh: Sequence[Rollout] = ()) -> dict[str, float | str]:
        """Let theta_s be what was published, if it is not yet; `fresh` is scored with both.

        Returns kl/self_prefix and the like, when there is a batch to measure them on. Called by all ranks.
        """
        if not self.theta_s_is_old:
            return {}
        self.theta_s_is_old = False
        started = time.monotonic()
        scores = PrefixScores(self.policy, fresh, self.config) if fresh else None
        old = scores.score(self.snapshot.score) if scores else None
        self.broadcaster.refresh(self.policy, self.snapshot, step=self.next_batch)
        metrics: dict[str, float | str] = {}
        if scores is not None and old is not None:
            logp_mu, sequence = scores.reported()
            new = scores.score(self.snapshot.score)
            metrics = {**self.prefix_kl, **self_prefix_metrics(logp_mu, old, new, sequence, scores.samplers)}
        spent = self.times.get("time/prefix_kl_s", 0.0)
        self.times["time/prefix_kl_s"] = spent + time.monotonic() - started
        return metrics

    def publish(self, version: int, keep_old: bool = False) -> None:
        """Send theta as `version`, and hold the same numbers as theta_s. Called by all ranks.

        With `keep_old` theta_s takes them only in `renew_snapshot`; theta does not change until then.
        """
        started = time.monotonic()
        attributes = {**messaging("send", self.place.keys.weights), "leeway.version": version}
        with span("publish weights", attributes, kind="producer") as opened:
            self.broadcaster.publish(
                self.policy, self.snapshot, version=version, step=self.next_batch, keep_old=keep_old
            )
            if opened is not None and (sent := self.broadcaster.last) is not None:
                opened.set_attributes({"leeway.codec": sent.codec, "leeway.wire_bytes": sent.wire_nbytes})
        self.theta_s_is_old = keep_old
        self.times["time/publish_s"] = self.times.get("time/publish_s", 0.0) + time.monotonic() - started
        if self.broadcaster.last is not None:
            self.times["weights/wire_bytes"] = float(self.broadcaster.last.wire_nbytes)

    def checkpoint_if_due(self) -> None:
        """Checkpoint every trainer.checkpoint_every steps, or when what waits for one fills the server;
        acknowledge what is durable.
        """
        every, full = self.config.trainer.checkpoint_every, self._server_fills_up()
        if every and (self.next_batch % every == 0 or full):
            self.checkpoint()
        elif not every and self.feed:
            self.feed.durable()

    def _server_fills_up(self) -> bool:
        full = 0
        if self.feed:
            memory = self.feed.memory()
            full = int(memory.fraction > PRESSURE)
            self.times["redis/memory_mib"] = memory.used / 2**20
            self.times["redis/memory_fraction"] = memory.fraction
            if full:
                log.warning(
                    "the server's memory is %.0f%% full: checkpoint now, to let go of what was trained",
                    100 * memory.fraction,
                )
        return bool(self.ranks.share_int(full))

    def checkpoint(self) -> None:
        """Write a checkpoint, then acknowledge the rollouts that it contains. Called by all ranks."""
        started = time.monotonic()
        trainer = self.config.trainer
        state = TrainState(
            next_batch=self.next_batch,
            version=self.version,
            published_at=self.published_at,
            epoch=self.epoch,
            ranks=self.ranks.size,
            zero_stage=trainer.zero_stage,
            dtype=trainer.dtype,
            model=self.config.model.name,
        )
        self.checkpointed = self.next_batch
        with span("checkpoint", {"leeway.step": self.next_batch}):
            path = save_checkpoint(
                self.place.out / "checkpoints", self.policy, state, trainer.keep_checkpoints
            )
            if self.feed:
                self.feed.durable()
        self.times["time/checkpoint_s"] = time.monotonic() - started
        log.info("checkpoint %s", path)

    def finish(self) -> None:
        """The last checkpoint (unless it was just written), the model, the report."""
        if self.checkpointed != self.next_batch:
            self.checkpoint()
        if self.config.output.save_model:
            export_model(
                self.place.out / "model",
                self.policy,
                self.place.model,
                step=self.next_batch,
                trust_remote_code=self.config.model.trust_remote_code,
            )
        self._report("finished", self.next_batch)

    # -- parts -----------------------------------------------------------------------------------------

    def _begin_epoch(self, last_epoch: int) -> None:
        self.epoch = self.ranks.share_int(self._new_epoch(last_epoch))
        self.broadcaster = Broadcaster(
            self.config, self.ranks, self.place.client, self.place.keys, self.epoch
        )
        self.feed = self._feed()

    def _new_epoch(self, last_epoch: int) -> int:
        client, state = self.place.client, self.place.keys.state
        if client is None:
            return 0

        def count() -> int:
            epoch = int(cast(int, client.hincrby(state, EPOCH_FIELD, 1)))
            if epoch <= last_epoch:  # resumed on a server that never saw the run
                epoch = last_epoch + 1
                client.hset(state, EPOCH_FIELD, str(epoch))
            return epoch

        return retrying(count, budget_s=self.config.redis.reconnect_s, what="counting the run epoch")

    def _feed(self) -> Feed | None:
        if self.place.client is None:
            return None
        return Feed(
            self.place.client,
            self.place.keys,
            self.config,
            epoch=self.epoch,
            version=self.version,
            next_batch=self.next_batch,
        )

    def _next_command(self) -> int:
        if self.feed is None:
            return STOP  # unused: rank 0's command counts
        verdicts = self.feed.verdicts

        def wake() -> bool:
            verdicts.poll()
            return (
                self.stopping
                or verdicts.resync_since(self.answered) is not None
                or self.broadcaster.keyframe_wanted()
            )

        try:
            if self.feed.wait(wake, first=self.next_batch == self.first_batch):
                return TRAIN
        except StreamsLostError as error:
            log.warning("%s", error)
            return RENEW
        return STOP if self.stopping else RESYNC

    def _pause(self) -> None:
        if self.ranks.share_int(int(self.stopping)):
            raise StoppedError(f"the trainer was told to stop; step {self.next_batch} is abandoned")

    def _stop_asked(self) -> bool:
        return self.stopping

    def _facts(self, metrics: Metrics, step: int) -> SyncFacts:
        age, last = self.next_batch - self.published_at, step + 1 >= self.config.trainer.steps
        return read_facts(metrics, step=step, age=age, last=last)

    def _with_times(self, metrics: Metrics, step: int) -> Metrics:
        # Times of what happened since the last report; the verdict, publication and checkpoint of the step
        # before are part of this one.
        now = time.monotonic()
        wall, self.mark = now - self.mark, now
        times, self.times = self.times, {}
        busy = metrics["time/score_s"] + metrics["time/train_s"]
        result = {
            **metrics,
            "lag/age": float(step - self.published_at),
            "verdict/self": 0.0,
            "time/publish_s": 0.0,
            "weights/wire_bytes": 0.0,
            **times,
            "time/step_s": wall,
            "trainer/tokens_per_s": metrics["tokens"] / max(busy, 1e-9),
            "trainer/busy_fraction": 1.0 - min(1.0, times.get("time/wait_s", 0.0) / max(wall, 1e-9)),
        }
        if self.feed:
            result["tokens/voided"] = float(self.feed.tokens_voided)
            result["rollouts/duplicates"] = float(self.feed.duplicates)
            self.feed.tokens_voided = self.feed.duplicates = 0
        return result

    def _report(self, event: str, step: int, metrics: Mapping[str, float | str] | None = None) -> None:
        if self.feed is None:
            return
        found = metrics or {}
        observe(event, found)
        with span("report", messaging("send", self.place.keys.reports), kind="producer"):
            header = ReportHeader.model_validate(
                {
                    "event": event,
                    "epoch": self.epoch,
                    "step": step,
                    "version": self.version,
                    "age": self.next_batch - self.published_at,
                    "metrics": found,
                    "traceparent": traceparent(),
                }
            )
            if event == "step":
                self.last_step = header
            self.feed.report(header)
