"""The controller on real streams; trainer and samplers are played by the test, message by message."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis
import torch

from leeway.config import RunConfig
from leeway.config.identity import identify
from leeway.config.load import build_config
from leeway.diagnose import tell_start
from leeway.errors import StalledError
from leeway.events import EventTail
from leeway.messages import (
    Report,
    ReportHeader,
    SamplerStatus,
    Ticket,
    Verdict,
    VerdictHeader,
    decode,
)
from leeway.statuses import FULL, write_status
from leeway.streams import MANUAL_FIELD, TICKETS_GROUP, Consumer, Keys, Tail, append, now
from leeway.weights import publish_weights
from leeway_controller import reports
from leeway_controller.plan import plan_batch, ticket_seed
from leeway_controller.reconcile import Controller

GOOD = {"lag/ess_tok": 0.99, "lag/ess_seq": 0.9, "lag/clip_fraction": 0.0}


def report_of(step: int) -> ReportHeader:
    return ReportHeader(event="step", epoch=1, step=step, version=1, age=1, metrics=dict(GOOD))


class Play:
    """A run of the controller with the test as trainer and samplers."""

    def __init__(
        self, client: redis.Redis, keys: Keys, order_seed: int | None = None, **sync: object
    ) -> None:
        self.client, self.keys = client, keys
        self.config: RunConfig = build_config(
            {
                "task": {"kind": "digits"},
                "batch": {"prompts": 2, "group_size": 2, "order_seed": order_seed},
                "trainer": {"steps": 6},
                "sampler": {"start_timeout_s": 0.2},
                "sync": {"max_age": None, **sync},
                "seed": 5,
            }
        )
        self.digest = identify(self.config).digest
        self.digests: dict[int, str] = {}
        self.verdict_tail = Tail(client, keys.verdicts)
        self.ticket_tail = Tail(client, keys.tickets)
        self.controller = self.fresh_controller()

    def fresh_controller(self) -> Controller:
        return Controller(self.client, self.keys, self.config, lambda item: [item + 1], 10)

    def report(
        self, event: str, step: int, version: int, epoch: int = 1, age: int = 1, **metrics: float
    ) -> None:
        values = {**GOOD, **{k.replace("__", "/"): v for k, v in metrics.items()}}
        header = ReportHeader(
            event=event,
            epoch=epoch,
            step=step,
            version=version,
            age=age,
            config=self.digest,
            metrics=values,  # type: ignore[arg-type]
        )
        append(self.client, self.keys.reports, Report(header))
        self.controller.tick()

    def publish(self, version: int, step: int, epoch: int = 1) -> None:
        weights = [("w", torch.full((4,), float(version)))]
        manifest = publish_weights(
            self.client,
            self.keys,
            epoch=epoch,
            version=version,
            step=step,
            tensors=weights,
            wire_dtype="float32",
        )
        self.digests[version] = manifest.digest
        self.controller.tick()

    def beat(self, name: str, version: int, epoch: int = 1, ago: float = 0.0, **change: Any) -> None:
        status = SamplerStatus(
            sampler=name,
            heartbeat=now() - ago,
            epoch=epoch,
            version=version,
            config=self.digest,
            **{"digest": self.digests.get(version, ""), **change},  # type: ignore[arg-type]
        )
        write_status(self.client, self.keys, status, budget_s=5.0)
        self.controller.tick()

    def verdicts(self) -> list[VerdictHeader]:
        return [decode(Verdict, e.fields).header for e in self.verdict_tail.read(block_s=None)]

    def tickets(self) -> list[tuple[int, int, int]]:
        """(batch, version, item) of new tickets, one per group."""
        found = [decode(Ticket, e.fields).header for e in self.ticket_tail.read(block_s=None)]
        return sorted({(t.batch, t.version, t.item) for t in found})

    def batches(self) -> list[tuple[int, int]]:
        return sorted({(batch, version) for batch, version, _ in self.tickets()})

    def started(self, version: int = 1) -> None:
        self.report("started", 0, version)
        self.publish(version, 0)
        self.beat("a", version)

    def events(self) -> list[str]:
        return [event.name for event in EventTail(self.client, self.keys).read()]


def test_a_run_from_start_to_end(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys, max_lead=1)
    play.report("started", 0, 1)
    play.publish(1, 0)
    assert play.batches() == []  # nobody holds the version yet
    play.beat("a", 1)
    assert play.tickets() == [(b, 1, i) for b in (0, 1) for i in sorted(plan_batch(10, 5, b, 2))]
    for step in range(5):
        play.report("step", step, 1)
        assert [(v.step, v.action) for v in play.verdicts()] == [(step, "continue")]
        assert play.batches() == ([(step + 2, 1)] if step + 2 < 6 else [])
    play.report("step", 5, 1, lag__ess_tok=0.1)
    assert [v.action for v in play.verdicts()] == ["continue"]  # nothing follows
    play.report("finished", 6, 1)
    assert play.controller.state.finished


def test_the_order_of_the_prompts_may_have_a_seed_of_its_own(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys, order_seed=8)
    play.started()
    assert [item for _, _, item in play.tickets()] == [
        i for b in (0, 1) for i in sorted(plan_batch(10, 8, b, 2))
    ]
    first = decode(Ticket, Tail(client, keys.tickets).read(block_s=None)[0].fields).header
    assert first.seed == ticket_seed(5, 0, 0, 0)  # what is drawn follows the run's own seed


def test_synchronous_mode_issues_one_batch_at_a_time(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys, max_lead=0)
    play.started()
    assert play.batches() == [(0, 1)]
    play.report("step", 0, 1)
    assert play.batches() == [(1, 1)]


def test_resync_voids_what_is_in_flight_and_issues_it_again(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys, max_lead=2)
    play.started()
    first = play.tickets()
    play.report("step", 0, 1, lag__ess_tok=0.4)
    assert [(v.action, v.reason) for v in play.verdicts()] == [("resync", "ess")]
    assert play.tickets() == []
    play.publish(2, 1)
    assert play.tickets() == []
    play.beat("a", 2)
    again = play.tickets()
    assert {b for b, _, _ in again} == {1, 2, 3}
    assert {v for _, v, _ in again} == {2}
    assert {(b, i) for b, _, i in again if b < 3} == {(b, i) for b, _, i in first if b > 0}


def test_a_repeated_report_changes_nothing(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys)
    play.started()
    play.batches()
    for _ in range(2):
        play.report("step", 0, 1)
    assert [v.step for v in play.verdicts()] == [0]
    assert play.batches() == [(2, 1)]


def test_repeated_reports_are_no_progress(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys)
    play.started()
    play.report("step", 0, 1)
    seen = play.controller.progress.at
    for event, step in (("step", 0), ("started", 0)):
        play.report(event, step, 1)
    assert play.controller.progress.at == seen
    play.report("step", 1, 1)
    assert play.controller.progress.at > seen


def test_reports_are_trimmed_behind_those_that_were_answered(
    client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "REPORTS_KEPT", 3)
    play = Play(client, keys)
    play.started()
    for step in range(4):
        play.report("step", step, 1)
    assert client.xlen(keys.reports) == 4  # three that were answered before, and the newest
    play.controller = play.fresh_controller()
    play.controller.tick()
    for step in (4, 5):
        append(client, keys.reports, Report(report_of(step)))
    assert client.xlen(keys.reports) == 6, "what was not answered stays"
    play.controller.tick()
    assert [v.step for v in play.verdicts()] == list(range(6))


def test_a_restarted_controller_goes_on_where_the_last_one_stopped(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys)
    play.started()
    play.report("step", 0, 1)
    assert play.batches() == [(0, 1), (1, 1), (2, 1)]
    play.controller = play.fresh_controller()
    play.controller.tick()
    assert play.batches() == []
    play.report("step", 1, 1, lag__ess_tok=0.1)
    play.controller = play.fresh_controller()  # between the verdict and the new version
    play.publish(2, 2)
    play.beat("a", 2)
    assert play.batches() == [(2, 2), (3, 2)]


def test_a_restarted_trainer_voids_its_past(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys)
    play.started(version=3)
    play.report("step", 0, 3)
    play.batches()
    play.report("started", 0, 4, epoch=2)
    play.beat("a", 3)
    assert play.batches() == []
    play.publish(4, 0, epoch=2)
    play.beat("a", 4, epoch=1)  # the same number in an older epoch is not an attestation
    assert play.batches() == []
    play.beat("a", 4, epoch=2)
    assert play.batches() == [(0, 4), (1, 4)]
    play.report("step", 1, 3, epoch=1)  # an old trainer's last word
    assert [v.epoch for v in play.verdicts()] == [1]  # only the answer to step 0 of epoch 1


def test_a_slow_sampler_is_fenced_after_the_budget(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys, commit_timeout_s=2.0)
    play.report("started", 0, 1)
    play.publish(1, 0)
    play.beat("slow", -1)
    play.beat("a", 1)
    assert play.batches() == []
    deadline = now() + 20
    while not play.controller.state.current and now() < deadline:
        play.controller.tick(block_s=0.05)
    assert play.batches() == [(0, 1), (1, 1)]
    assert "sampler_fenced" in play.events()
    assert client.hkeys(keys.fences) == [b"slow"]
    fence = client.hget(keys.fences, "slow").decode()  # type: ignore[union-attr]
    assert not fence.endswith(FULL), "being late is no reason to begin again"
    play.beat("slow", 1)  # late, and not reloaded
    play.controller = play.fresh_controller()
    play.controller.tick()
    assert client.hkeys(keys.fences) == [b"slow"]
    play.beat("slow", 1, passed=fence)
    assert client.hkeys(keys.fences) == []
    assert "sampler_rejoined" in play.events()


def test_a_sampler_that_holds_something_else_is_fenced_at_once(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys)
    play.started()
    play.beat("b", 1, digest="of something else")
    assert client.hkeys(keys.fences) == [b"b"]
    assert client.hget(keys.fences, "b").decode().endswith(FULL)  # type: ignore[union-attr]
    assert "sampler_fenced" in play.events()
    play.report("step", 0, 1, lag__ess_tok=0.1)
    play.publish(2, 1)
    play.beat("a", 2)  # the fenced one holds nothing up
    assert play.batches()[-1] == (2, 2)


def test_a_version_that_was_not_published_lets_the_old_one_go_on(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys)
    play.started()
    play.batches()
    play.report("step", 0, 1, lag__ess_tok=0.1)
    assert play.batches() == []
    play.report("resync_failed", 1, 1)
    assert play.batches() == [(2, 1)]


def test_a_silent_sampler_holds_nothing_up(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys)
    play.report("started", 0, 1)
    play.publish(1, 0)
    play.beat("dead", -1, ago=60)
    play.beat("a", 1)
    assert play.batches() == [(0, 1), (1, 1)]
    assert client.hkeys(keys.samplers) == [b"a"]
    assert "sampler_lost" in play.events()


def test_a_manual_resync_is_obeyed_once(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys)
    play.started()
    client.hset(keys.state, MANUAL_FIELD, "1")
    play.report("step", 0, 1)
    assert [v.reason for v in play.verdicts()] == ["manual"]
    play.publish(2, 1)
    play.beat("a", 2)
    play.report("step", 1, 2)
    assert [v.reason for v in play.verdicts()] == [None]


def test_garbage_is_refused_and_named(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys)
    play.started()
    client.xadd(keys.reports, {"h": "{}"})
    play.controller.tick()
    assert "bad_report" in play.events()
    play.report("step", 0, 1)
    assert len(play.verdicts()) == 1


def test_no_progress_ends_with_a_diagnosis(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys, stall_timeout_s=2.0)
    with pytest.raises(StalledError, match=r"waiting for the trainer's start; samplers: none"):
        play.controller.run()
    play.controller.progress.at = now() + 1e6
    play.started()
    taken = Consumer(client, keys.tickets, TICKETS_GROUP, "a").read(1, 0.1)
    assert taken
    play.controller.progress.at = 0
    with pytest.raises(StalledError) as caught:
        play.controller.tick()
    said = str(caught.value)
    assert "waiting for the report of step 0; samplers: a (version 1" in said
    assert "1 in progress (1.1.0.0.0 at a, delivered 1 times, idle for 0 s, last heartbeat" in said
    assert "7 queued" in said
    play.controller.progress.at = now() + 1e6
    play.beat("a", 1, ago=30)
    play.controller.progress.at = 0
    with pytest.raises(StalledError) as caught:
        play.controller.tick()
    assert "samplers: none; lost: a (last heartbeat 30 s ago); tickets: 1 in progress" in str(caught.value)


def test_a_fetch_of_weights_is_progress_however_long_it_takes(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys, stall_timeout_s=2.0)
    play.report("started", 0, 1)
    play.publish(1, 0)
    play.controller.progress.at = time.monotonic() - 1000
    play.beat("a", -1, fetched_at=now())  # the beat comes with a pass of the controller
    write_status(
        client,
        keys,
        SamplerStatus(sampler="a", heartbeat=now(), config=play.digest, fetched_at=now() - 100),
        budget_s=5.0,
    )
    with pytest.raises(StalledError, match="waiting for version 1 to be attested"):
        play.controller.tick()


def test_a_service_that_starts_again_is_waited_for(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys, stall_timeout_s=10.0)
    sampler = play.config.sampler.model_copy(update={"start_timeout_s": 600.0})
    play.controller.progress.config = play.config.model_copy(update={"sampler": sampler})
    play.started()
    play.report("step", 0, 1)
    tell_start(client, keys, "trainer", budget_s=1.0)
    play.controller.progress.at -= 100
    play.controller.tick()
    play.controller.progress.at -= 600
    with pytest.raises(StalledError):
        play.controller.tick()
    client.delete(keys.events)
    play.controller.progress.at += 600
    with pytest.raises(StalledError):
        play.controller.tick()


def test_responses_are_progress_too(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys)
    play.started()
    play.controller.progress.at = 0
    play.beat("a", 1, tickets=3)  # would raise StalledError
    play.controller.progress.at = 0
    with pytest.raises(StalledError):
        play.beat("a", 1, tickets=3)
