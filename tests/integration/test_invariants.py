"""The invariants of DESIGN.md under any order of events: a state machine over the real streams.

Controller, planning, consumers, feed, assembler and weights are the real code on a real server; what is
played is generation (an answer is made up), training (a list of what was trained) and time. Rules happen in
any order: messages are read late, answers are written twice, samplers die and come back, tickets change
hands, controller and trainer crash, the server loses everything. After each example the faults stop and the
run must come to its end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import redis
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import leeway_trainer.feed as feed_module
from leeway.batches import plan_batch, plan_ticket_ids
from leeway.config.identity import identify
from leeway.config.load import build_config
from leeway.messages import ReportHeader, Rollout, RolloutHeader, SamplerStatus, Ticket, decode, encode
from leeway.statuses import write_status
from leeway.streams import EPOCH_FIELD, TICKETS_GROUP, Consumer, Entry, Keys, add_fields, now
from leeway.weights import latest_manifest, publish_weights
from leeway_controller.reconcile import Controller
from leeway_trainer.feed import Feed, StreamsLostError

STEPS, PROMPTS, GROUP, ITEMS = 5, 2, 2, 7
SAMPLERS = ("a", "b")
METRICS = {"lag/ess_tok": 0.9, "lag/ess_seq": 0.9, "lag/clip_fraction": 0.0}
BASE: dict[str, Any] = {
    "task": {"kind": "digits"},
    "seed": 3,
    "batch": {"prompts": PROMPTS, "group_size": GROUP},
    "trainer": {"steps": STEPS},
}
DIGEST = identify(build_config(BASE)).digest
Version = tuple[int, int]
"""(epoch, version)"""


class PlayedSampler:
    """What `leeway_sampler.serve` does with tickets, without an engine."""

    def __init__(self, client: redis.Redis, keys: Keys, name: str) -> None:
        self.client, self.keys, self.name = client, keys, name
        self.consumer = Consumer(client, keys.tickets, TICKETS_GROUP, name, budget_s=2)
        self.wanted: Version = (-1, -1)
        self.digest = ""
        self.held: list[Entry] = []

    def sync(self) -> None:
        """Load the newest version and attest it."""
        manifest = latest_manifest(self.client, self.keys)
        if manifest is not None and manifest.key >= self.wanted:
            self.wanted, self.digest = manifest.key, manifest.digest
        status = SamplerStatus(
            sampler=self.name, heartbeat=now(), epoch=self.wanted[0], version=self.wanted[1],
            digest=self.digest, config=DIGEST, ready=True,
        )  # fmt: skip
        write_status(self.client, self.keys, status, budget_s=5.0)

    def take(self, claim: bool) -> None:
        if self.wanted[0] >= 0:
            self.held += self.consumer.claim_stale(0.0, 3) if claim else self.consumer.read(3, 0)

    def answer(self, at: int, twice: bool) -> None:
        """Finish with one ticket; `twice`: the answer to the MULTI was lost, so it is repeated."""
        entry = self.held.pop(at % len(self.held))
        ticket = decode(Ticket, entry.fields)
        version = (ticket.header.epoch, ticket.header.version)
        for _ in range(1 + twice):
            with self.client.pipeline(transaction=True) as pipe:
                if version == self.wanted:
                    add_fields(pipe, self.keys.rollouts, encode(answer_to(ticket, self.name)))
                elif version > self.wanted:
                    add_fields(pipe, self.keys.tickets, entry.fields)
                self.consumer.queue_ack(pipe, [entry.id])
                pipe.execute()
        self.consumer.forget([entry.id])


def answer_to(ticket: Ticket, sampler: str) -> Rollout:
    shared = ticket.header.model_dump(exclude={"kind", "seed", "max_new_tokens"})
    header = RolloutHeader(
        **shared, sampler=sampler, finish_reason="stop", reward=0.0, spans=[(0, 1, ticket.header.version)]
    )
    one, logp = np.array([1], np.int32), np.array([-1.0], np.float32)
    return Rollout(header, ticket.prompt_ids, one, logp, np.array([0, 1], np.int32), one, logp)


class Run(RuleBasedStateMachine):
    """One run. `trained` is what the policy in memory contains, `saved` what the last checkpoint contains."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__()
        self.client = client
        client.flushall()
        self.keys = Keys("machine")
        self.next_batch, self.version, self.epoch = 0, 0, -1
        self.trained: list[list[str]] = []
        self.saved: tuple[int, int] | None = None
        self.versions: list[Version] = []
        self.awaits_verdict: int | None = None

    @initialize(lead=st.integers(0, 2))
    def start(self, lead: int) -> None:
        sync = {"max_lead": lead, "max_age": 2, "ticket_idle_s": 3600, "commit_timeout_s": 3600}
        self.config = build_config({**BASE, "sync": sync})
        self.restart_controller()
        self.samplers = {name: PlayedSampler(self.client, self.keys, name) for name in SAMPLERS}
        self.begin_epoch()

    # -- controller ------------------------------------------------------------------------------------

    @rule()
    def restart_controller(self) -> None:
        self.controller = Controller(self.client, self.keys, self.config, lambda item: [item + 1], ITEMS)

    @rule()
    def tick(self) -> None:
        statuses = self.controller.samplers.statuses()
        before = self.controller.state
        self.controller.tick()
        state = self.controller.state
        if state.current is not None and (state.epoch, state.current) != (before.epoch, before.current):
            held = {(s.epoch, s.version) for s in statuses}
            assert held == {(state.epoch, state.current)}, "current, but not every live sampler attested it"

    # -- samplers --------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(SAMPLERS))
    def load_weights(self, name: str) -> None:
        self.samplers[name].sync()

    @rule(name=st.sampled_from(SAMPLERS), claim=st.booleans())
    def take_tickets(self, name: str, claim: bool) -> None:
        self.samplers[name].take(claim)

    @rule(name=st.sampled_from(SAMPLERS), at=st.integers(0, 9), twice=st.booleans())
    def answer(self, name: str, at: int, twice: bool) -> None:
        if self.samplers[name].held:
            self.samplers[name].answer(at, twice)

    @rule(name=st.sampled_from(SAMPLERS))
    def sampler_dies(self, name: str) -> None:
        self.client.hdel(self.keys.samplers, name)  # which the controller does when it falls silent
        self.samplers[name] = PlayedSampler(self.client, self.keys, name)

    # -- trainer ---------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """What a trainer does at its start, and when the server came back empty."""
        self.epoch = max(int(self.client.hincrby(self.keys.state, EPOCH_FIELD, 1)), self.epoch + 1)
        self.client.hset(self.keys.state, EPOCH_FIELD, str(self.epoch))
        self.feed = Feed(
            self.client, self.keys, self.config, epoch=self.epoch, version=self.version,
            next_batch=self.next_batch,
        )  # fmt: skip
        self.published_at, self.awaits_verdict = self.next_batch, None
        self.publish()
        self.report("started", self.next_batch)

    def publish(self) -> None:
        publish_weights(
            self.client, self.keys, epoch=self.epoch, version=self.version, step=self.next_batch,
            tensors=[("w", torch.zeros(2))],
        )  # fmt: skip
        self.versions.append((self.epoch, self.version))

    def report(self, event: Any, step: int) -> None:
        age = self.next_batch - self.published_at
        metrics = dict(METRICS) if event == "step" else {}
        self.feed.report(
            ReportHeader(
                event=event,
                epoch=self.epoch,
                step=step,
                version=self.version,
                age=age,
                config=DIGEST,
                metrics=metrics,
            )
        )

    @property
    def done(self) -> bool:
        return self.next_batch == STEPS

    @precondition(lambda self: not self.done)
    @rule()
    def read_rollouts(self) -> None:
        try:
            self.feed._check_epoch()
            self.feed._read()
        except StreamsLostError:
            self.version += 1
            self.begin_epoch()

    @property
    def can_train(self) -> bool:
        return not self.done and self.awaits_verdict is None and self.feed.assembler.complete()

    @precondition(lambda self: self.can_train)
    @rule()
    def train(self) -> None:
        rollouts = self.feed.take()
        ids = [r.header.ticket_id for r in rollouts]
        assert ids == plan_ticket_ids(self.epoch, self.version, self.next_batch, PROMPTS, GROUP)
        items = plan_batch(ITEMS, 3, self.next_batch, PROMPTS)
        assert [r.header.item for r in rollouts] == [item for item in items for _ in range(GROUP)]
        assert [r.prompt_ids.tolist() for r in rollouts] == [[r.header.item + 1] for r in rollouts]
        assert {(r.header.epoch, r.header.version) for r in rollouts} == {(self.epoch, self.version)}
        self.trained.append(ids)
        self.next_batch += 1
        self.awaits_verdict = self.next_batch - 1
        self.report("step", self.awaits_verdict)

    @precondition(lambda self: self.awaits_verdict is not None)
    @rule(alone=st.none() | st.booleans())
    def obey_verdict(self, alone: bool | None) -> None:
        """Follow the controller; `alone`: no verdict came in time, and this is what the trainer decided."""
        step, self.awaits_verdict = self.awaits_verdict, None
        assert step is not None
        if self.done:
            return
        self.feed.verdicts.poll()
        wanted = self.feed.verdicts.resync_since(self.published_at) is not None
        if step not in self.feed.verdicts._known:
            if alone is None:
                self.awaits_verdict = step
                return
            wanted = wanted or alone
        if wanted:
            self.resync()

    @precondition(lambda self: self.awaits_verdict is None and not self.done)
    @rule()
    def obey_late_verdict(self) -> None:
        self.feed.verdicts.poll()
        if self.feed.verdicts.resync_since(self.published_at) is not None:
            self.resync()

    def resync(self) -> None:
        self.version += 1
        self.published_at = self.next_batch
        self.publish()
        self.feed.renew(self.version)

    @rule()
    def checkpoint(self) -> None:
        self.saved = (self.next_batch, self.version)
        self.feed.durable()

    @rule()
    def trainer_crashes(self) -> None:
        batch, version = self.saved or (0, -1)
        self.trained = self.trained[:batch]
        self.next_batch, self.version = batch, version + 1
        self.begin_epoch()

    @rule()
    def server_loses_everything(self) -> None:
        self.client.flushall()

    # -- what always holds -----------------------------------------------------------------------------

    @invariant()
    def versions_only_rise(self) -> None:
        assert self.versions == sorted(set(self.versions))

    @invariant()
    def what_was_trained_is_in_order(self) -> None:
        assert len(self.trained) == self.next_batch
        for batch, ids in enumerate(self.trained):
            assert {int(name.split(".")[2]) for name in ids} == {batch}

    @invariant()
    def what_no_checkpoint_holds_is_still_there(self) -> None:
        if self.epoch < 0 or self.client.hget(self.keys.state, EPOCH_FIELD) != str(self.epoch).encode():
            return  # before the start, or the server lost everything
        there = {entry_id for entry_id, _ in self.client.xrange(self.keys.rollouts)}  # type: ignore[union-attr]
        assert set(self.feed._trained) <= there

    # -- progress --------------------------------------------------------------------------------------

    @rule(rounds=st.integers(1, 3), asleep=st.none() | st.sampled_from(SAMPLERS))
    def nothing_goes_wrong_for_a_while(self, rounds: int, asleep: str | None) -> None:
        """Without this, five steps in a row are too rare for anything to break."""
        for _ in range(rounds):
            self.round(asleep)

    def round(self, asleep: str | None = None) -> None:
        """Everyone does what there is to do, once; but for a sampler that is `asleep`."""
        self.tick()
        for name, sampler in self.samplers.items():
            if name == asleep:
                continue
            sampler.sync()
            sampler.take(claim=False)
            sampler.take(claim=True)
            while sampler.held:
                sampler.answer(0, twice=False)
        if not self.done:
            self.read_rollouts()
        if self.awaits_verdict is not None:
            self.obey_verdict(alone=False)
        elif not self.done:
            self.obey_late_verdict()
        if self.can_train:
            self.train()
        self.versions_only_rise()
        self.what_was_trained_is_in_order()
        self.what_no_checkpoint_holds_is_still_there()

    def teardown(self) -> None:
        """No more faults: the run ends, with every batch trained."""
        for _ in range(400):
            if self.done:
                break
            self.round()
        assert self.done, (
            self.controller.state, self.epoch, self.version, self.next_batch, self.feed.assembler.awaited()
        )  # fmt: skip
        assert len(self.trained) == STEPS


MANY = pytest.param(1500, 80, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


@pytest.mark.parametrize(("examples", "length"), [(60, 30), MANY])
def test_whatever_happens_the_invariants_hold_and_the_run_ends(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, examples: int, length: int
) -> None:
    monkeypatch.setattr(feed_module, "POLL_S", 0)
    run_state_machine_as_test(
        lambda: Run(client),
        settings=settings(
            max_examples=examples,
            stateful_step_count=length,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # shrinking would replay the example a thousand times
            database=None,
        ),
    )
