"""Rank 0's side of the streams: rollouts in, reports out, verdicts in.

rollouts -> of another version or run epoch, or a duplicate -> acknowledged at once: they have no effect
         -> held in the assembler -> batch taken -> trained -> durable -> acknowledged and deleted
         -> invalid (rejects.py), or deleted by others (deletions.py) -> what was in flight is drawn again
state    -> another run epoch than ours: the server lost its data, or another trainer took over
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import redis

from leeway.checks.board import post_rejected
from leeway.config import RunConfig
from leeway.config.identity import identify, short
from leeway.diagnose import describe_tickets, is_stalled
from leeway.errors import LeewayError, StalledError
from leeway.events import CONFIG_DIFFERS, write_event
from leeway.messages import (
    EventLevel,
    MessageError,
    Report,
    ReportHeader,
    Rollout,
    Slot,
    Verdict,
    VerdictHeader,
    decode,
)
from leeway.metrics.areas.tokens import ROLLOUTS_DUPLICATES, TOKENS_VOIDED
from leeway.run_state import RunState
from leeway.streams import (
    ROLLOUTS_GROUP,
    Consumer,
    Entry,
    Keys,
    Tail,
    append,
    check_epoch,
    retrying,
    write_in_epoch,
)
from leeway_trainer.assemble import Admission, AssemblyError, BatchAssembler, describe_slots
from leeway_trainer.deletions import Deletions
from leeway_trainer.losses import is_overdue, manifests_are_gone
from leeway_trainer.rejects import Note, check_attempts, move_aside, of_older_epoch

log = logging.getLogger(__name__)
POLL_S = 0.25
"""Maximum length of a single wait, so that signals and late verdicts are noticed."""
NOTE_EVERY_S = 10.0
READ_COUNT = 64
CONSUMER = "trainer"
PRESSURE = 0.7
"""Share of the server's memory in use above which trained rollouts are made durable at once."""


class StreamsLostError(LeewayError):
    """What is in flight has to be drawn again: the server came back without it, or it is unusable."""


@dataclass(frozen=True)
class Memory:
    """The server's memory in bytes; `limit` 0: none."""

    used: int
    limit: int

    @property
    def fraction(self) -> float:
        """Share of the limit that is used, 0 without one."""
        return self.used / self.limit if self.limit else 0.0


class Arrived(NamedTuple):
    """What one read brought: entries of the stream, and how many of them filled a slot."""

    entries: int
    filled: int


class Feed:
    """Streams of one run epoch.

    `version`: the weight version that rollouts must be drawn under; `next_batch`: the first batch.
    """

    def __init__(
        self, client: redis.Redis, keys: Keys, config: RunConfig, *, epoch: int, version: int, next_batch: int
    ) -> None:
        self.client, self.keys, self.config, self.epoch = client, keys, config, epoch
        self.budget_s = config.redis.reconnect_s
        self.assembler = BatchAssembler(
            config.batch.prompts,
            config.batch.group_size,
            epoch=epoch,
            version=version,
            batch=next_batch,
            config=identify(config).digest,
        )
        self._foreign: set[tuple[str, str]] = set()
        """(sampler, configuration) of rollouts of another configuration; each is announced once."""
        self.verdicts = Verdicts(client, keys, epoch, self.budget_s)
        self._followed = False
        """Whether the controller has known this epoch."""
        self.tokens_voided = 0
        self.duplicates = 0
        """Rollouts for a slot that was already filled; they are dropped."""
        self._rollouts = Consumer(client, keys.rollouts, ROLLOUTS_GROUP, CONSUMER, budget_s=self.budget_s)
        self._deletions = Deletions(client, keys.rollouts, self.budget_s)
        self._entry_of: dict[Slot, bytes] = {}
        self._trained: list[bytes] = []

    def wait(self, wake: Callable[[], bool], first: bool = False) -> bool:
        """Wait until the current batch is complete (True) or `wake` returns True (False).

        `first`: samplers may still be starting. Raises StalledError, naming the empty slots, when no rollout
        arrives for sync.stall_timeout_s (while samplers start or restart: sampler.start_timeout_s, if that is
        longer); StreamsLostError and SupersededError.
        """
        limit, start_s = self.config.sync.stall_timeout_s, self.config.sampler.start_timeout_s
        if first:
            limit = max(limit, start_s)
        progress = noted = time.monotonic()
        while not self.assembler.complete():
            if wake():
                return False
            self._check_epoch()
            if self._read().filled:
                progress = time.monotonic()
            else:
                self._check_losses()
            now = time.monotonic()
            if is_stalled(self.client, self.keys, now - progress, limit, start_s):
                raise StalledError(
                    f"no rollout arrived for {now - progress:.0f} s (version {self.assembler.version}, "
                    f"epoch {self.epoch}); awaited: {describe_slots(self.assembler.awaited())}; "
                    f"{describe_tickets(self.client, self.keys)}"
                )
            if now - noted > NOTE_EVERY_S:
                noted = now
                log.info("waiting for rollouts: %s", describe_slots(self.assembler.awaited()))
        return True

    def _check_epoch(self) -> None:
        lost = self._deletions.by_others()  # before the epoch: a newer trainer deletes rollouts rightly
        found = check_epoch(self.client, self.keys, self.epoch, budget_s=self.budget_s)
        if found.epoch < self.epoch:
            raise StreamsLostError(f"Redis does not know run epoch {self.epoch}: it lost its data")
        version = self.assembler.version
        if found.published != f"{self.epoch}.{version}":
            raise StreamsLostError(
                f"Redis does not know weights version {version} of run epoch {self.epoch}: it lost its last "
                "writes"
            )
        if lost:
            text = (
                f"{lost} rollouts were deleted from {self.keys.rollouts} by a client other than this "
                f"trainer; everything in flight of epoch {self.epoch} is drawn again"
            )
            self.event("error", "rollouts_deleted", text)
            raise StreamsLostError(text)

    def _check_losses(self) -> None:
        """Raise StreamsLostError if samplers can no longer answer what is awaited.

        If every ticket of the batch was answered, rollouts that a late delivery left pending are read first.
        """
        if manifests_are_gone(self.client, self.keys, self.budget_s):
            raise StreamsLostError(
                f"Redis has lost the manifest of weights version {self.assembler.version} of run epoch "
                f"{self.epoch}"
            )
        state = RunState.load(self.client, self.keys, budget_s=self.budget_s)
        if self._followed and state.epoch < self.epoch:
            raise StreamsLostError(
                f"the controller has begun again and does not know run epoch {self.epoch}: Redis has lost "
                "what it wrote"
            )
        self._followed = self._followed or state.epoch == self.epoch
        if not is_overdue(self.client, self.keys, state, self.assembler, self.budget_s):
            return
        self._rollouts.look_again()
        while self._read(0).entries:
            pass
        if not self.assembler.complete():
            raise StreamsLostError(
                f"{describe_slots(self.assembler.awaited())}: neither tickets nor rollouts are left: "
                "Redis has lost a part of its data"
            )

    def check_newest(self) -> None:
        """Raise SupersededError if a newer trainer has started."""
        check_epoch(self.client, self.keys, self.epoch, budget_s=self.budget_s)

    def memory(self) -> Memory:
        """How full the server is."""
        what = "reading the memory use"
        found: Any = retrying(lambda: self.client.info("memory"), budget_s=self.budget_s, what=what)
        return Memory(int(found["used_memory"]), int(found.get("maxmemory", 0)))

    def take(self) -> list[Rollout]:
        """The current batch, which is complete, in slot order; its entries stay pending until `durable`."""
        rollouts = self.assembler.take()
        self._trained += [self._entry_of.pop(r.header.slot) for r in rollouts]
        return rollouts

    def durable(self) -> None:
        """Everything trained so far is in a checkpoint: acknowledge and delete its rollouts.

        Raises SupersededError, as do `wait` and `renew`: the rollouts belong to the newest trainer.
        """
        self._ack(self._trained)
        self._trained = []

    def renew(self, version: int) -> None:
        """Accept only `version` from now on; rollouts held for the old one are void."""
        void = self.assembler.renew(version)
        self.tokens_voided += sum(int(r.response_ids.size) for r in void)
        self._ack([self._entry_of.pop(r.header.slot) for r in void])

    def take_counts(self) -> dict[str, float]:
        """What was dropped since the last call."""
        counts = {TOKENS_VOIDED: self.tokens_voided, ROLLOUTS_DUPLICATES: self.duplicates}
        found = {str(name): float(count) for name, count in counts.items()}
        self.tokens_voided = self.duplicates = 0
        return found

    def report(self, header: ReportHeader) -> None:
        """Write a report."""
        append(self.client, self.keys.reports, Report(header), budget_s=self.budget_s)

    def event(self, level: EventLevel, name: str, text: str) -> None:
        """Write an event, and log it."""
        log.log(logging.getLevelName(level.upper()), text)
        write_event(
            self.client,
            self.keys,
            level=level,
            source="trainer",
            name=name,
            text=text,
            budget_s=self.budget_s,
        )

    def _read(self, wait_s: float | None = None) -> Arrived:
        """Read what arrives within `wait_s` seconds (None: POLL_S)."""
        entries = self._rollouts.read(READ_COUNT, POLL_S if wait_s is None else wait_s)
        filled, useless = 0, []
        for entry in entries:
            try:
                rollout = decode(Rollout, entry.fields)
                admission = self.assembler.add(rollout)
            except (MessageError, AssemblyError) as error:
                self._reject(entry, error)
                continue
            if admission in (Admission.ACCEPTED, Admission.FUTURE):
                self._entry_of[rollout.header.slot] = entry.id
                filled += 1
                continue
            useless.append(entry.id)
            if admission is Admission.VOID:
                self.tokens_voided += int(rollout.response_ids.size)
                self._announce_foreign(rollout)
            else:
                self.duplicates += 1
            log.debug("rollout %s is %s", rollout.header.ticket_id, admission.value)
        self._ack(useless)
        return Arrived(len(entries), filled)

    def _announce_foreign(self, rollout: Rollout) -> None:
        header, own = rollout.header, self.assembler.config
        if header.config != own and header.epoch == self.epoch:
            who = header.sampler, header.config
            if who not in self._foreign:
                self._foreign.add(who)
                self.event(
                    "warning",
                    CONFIG_DIFFERS,
                    f"rollouts of sampler {header.sampler} are void: they were drawn under configuration "
                    f"{short(header.config)}, the trainer has {short(own)}",
                )

    def _reject(self, entry: Entry, error: LeewayError) -> None:
        """Move a rollout aside. Raises StreamsLostError if it is awaited, RolloutsUnusable after several."""
        self._deletions.expect([entry.id])
        note = Note(self.epoch, self.assembler.batch, str(error))
        ack = partial(self._rollouts.queue_ack, ids=[entry.id])
        move_aside(self.client, self.keys, entry, note, ack, budget_s=self.budget_s)
        self._rollouts.forget([entry.id])
        text = f"rollout {entry.id.decode()} was rejected and moved to {self.keys.rejected}: {error}"
        self.event("error", "rollout_rejected", text)
        if of_older_epoch(entry.fields, self.epoch):
            return
        post_rejected(self.client, self.keys, str(error), source="trainer", budget_s=self.budget_s)
        check_attempts(self.client, self.keys, self.assembler.batch, budget_s=self.budget_s)
        raise StreamsLostError(f"{text}; everything in flight of epoch {self.epoch} is drawn again")

    def _ack(self, ids: list[bytes]) -> None:
        """Acknowledge and delete rollouts, as long as this trainer is the newest."""
        if not ids:
            return
        self._deletions.expect(ids)
        write_in_epoch(
            self.client,
            self.keys,
            self.epoch,
            lambda pipe: self._rollouts.queue_ack(pipe, ids),
            budget_s=self.budget_s,
            what=f"acknowledging rollouts on {self.keys.rollouts}",
        )
        self._rollouts.forget(ids)


class Verdicts:
    """The controller's verdicts on the steps of this run epoch, including late ones."""

    def __init__(self, client: redis.Redis, keys: Keys, epoch: int, budget_s: float) -> None:
        self._tail = Tail(client, keys.verdicts, budget_s=budget_s)
        self._epoch = epoch
        self._known: dict[int, VerdictHeader] = {}

    def poll(self, block_s: float | None = None) -> None:
        """Read new verdicts, waiting up to block_s."""
        for entry in self._tail.read(block_s=block_s):
            header = decode(Verdict, entry.fields).header
            if header.epoch == self._epoch:
                self._known[header.step] = header

    def wait(self, step: int, budget_s: float, wake: Callable[[], bool]) -> VerdictHeader | None:
        """The verdict on `step`; None after budget_s, or when `wake` returns True."""
        deadline = time.monotonic() + budget_s
        while step not in self._known and not wake():
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.poll(min(left, POLL_S))
        # Of earlier steps only requests for a resync matter.
        self._known = {s: v for s, v in self._known.items() if s >= step or v.action == "resync"}
        return self._known.get(step)

    def resync_since(self, step: int) -> VerdictHeader | None:
        """The newest request for a resync after step `step` or later; newer weights answered earlier ones."""
        self._known = {s: v for s, v in self._known.items() if s >= step}
        due = [v for _, v in sorted(self._known.items()) if v.action == "resync"]
        return due[-1] if due else None
