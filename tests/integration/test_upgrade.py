"""A run is upgraded to another configuration, its processes one after the other in every order.

Controller, sampler and the trainer's side of the streams are the real code on a real server. Played are the
engine, which draws tokens that show its configuration, and the training of a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis
import torch

from leeway.config import RunConfig
from leeway.config.identity import identify
from leeway.config.load import build_config
from leeway.events import CONFIG_DIFFERS, EventTail
from leeway.rewards import RewardResult
from leeway.statuses import read_statuses
from leeway.streams import TICKETS_GROUP, Keys, append
from leeway_controller.plan import plan_tickets
from leeway_controller.reconcile import Controller
from leeway_sampler import serve
from leeway_sampler.generation import Generation
from leeway_sampler.rollouts import build_rollout
from leeway_sampler.serve import Sampler
from leeway_sampler.weight_update import NOTHING, Loaded, loaded_from
from leeway_trainer.epochs import TrainerSetup, begin_epoch
from leeway_trainer.reports import Reports
from leeway_trainer.timing import StepTimes
from leeway_trainer.transports.base import Link, NewVersion
from leeway_trainer.transports.kinds.redis import TRANSPORT

PROMPTS, GROUP, STEPS = 2, 2, 8
METRICS = {"lag/ess_tok": 0.9, "lag/ess_seq": 0.9, "lag/clip_fraction": 0.0}
OLD, NEW = 11, 22
"""The temperature of a configuration, and the token that its samplers draw."""


def config_of(temperature: int) -> RunConfig:
    return build_config(
        {
            "task": {"kind": "digits"},
            "sampling": {"temperature": float(temperature)},
            "batch": {"prompts": PROMPTS, "group_size": GROUP},
            "trainer": {"steps": STEPS},
            "sampler": {"max_num_seqs": 4},
            "sync": {"heartbeat_s": 0.05, "ticket_idle_s": 5.0, "verdict_timeout_s": 1.0},
            "checks": {"probe_draws": 0, "enabled": False},
        }
    )


class Weights:
    """The weights of a played engine: every version is loaded at once."""

    stage_s = pause_s = fetched_at = 0.0
    pausing = False

    def __init__(self) -> None:
        self.loaded = NOTHING

    async def apply(self, manifest: Any, **_: object) -> str:
        self.loaded = loaded_from(manifest)
        return self.loaded.digest

    def forget(self) -> None:
        pass


class Engine:
    """Draws the temperature of its configuration as a token."""

    logprobs_mode, bans, drawn, inflight = "processed_logprobs", (), 0, 0

    def __init__(self, config: RunConfig) -> None:
        self.token, self.weights = int(config.sampling.temperature), Weights()

    @property
    def version(self) -> int | None:
        return self.weights.loaded.version

    def healthy(self) -> bool:
        return True

    async def abort_all(self) -> None:
        pass

    async def generate(self, *_: object) -> Generation:
        version = self.version
        await asyncio.sleep(0.02)
        assert version is not None
        ids, logp = np.array([self.token], np.int32), np.array([-1.0], np.float32)
        return Generation(ids, logp, np.array([0, 1], np.int32), ids, logp, "stop", ((0, 1, version),), False)


class Rewards:
    async def score(self, item: int, text: str) -> RewardResult:
        return RewardResult(1.0)


class Trainer:
    """The trainer's side of the streams; `trained` receives (temperature, batch, tokens of the batch)."""

    def __init__(
        self, client: redis.Redis, keys: Keys, temperature: int, batch: int, trained: list[Any]
    ) -> None:
        self.config, self.temperature = config_of(temperature), temperature
        self.batch, self.trained = batch, trained
        ranks: Any = SimpleNamespace(first=True, size=1, share_int=lambda value: value)
        setup = TrainerSetup("", Path(), keys, client)
        self.epoch = begin_epoch(setup, self.config, ranks, last=-1, version=0, batch=batch)
        self.until = STEPS if temperature == NEW else STEPS - 2
        self.reports = Reports(self.config, keys, StepTimes())
        tensors = [("w", torch.full((4,), float(temperature)))]
        new = NewVersion(0, batch, 8, lambda: iter(tensors), lambda: iter(()), None, (), False)
        TRANSPORT.publish(new, Link(self.config, ranks, client, keys, self.epoch.number))
        self._report("started", batch)

    def _report(self, event: str, step: int, **metrics: float) -> None:
        self.reports.write(event, self.epoch, step=step, version=0, age=1, metrics=metrics)

    def step(self) -> None:
        """Read rollouts; train the next batch if it is complete."""
        feed = self.epoch.feed
        assert feed is not None
        if self.batch == self.until:
            return
        feed._read()
        if feed.assembler.complete():
            rollouts = feed.take()
            self.trained.append(
                (self.temperature, self.batch, {int(t) for r in rollouts for t in r.response_ids})
            )
            self._report("step", self.batch, **METRICS)
            self.batch += 1


def is_usual(order: tuple[str, ...]) -> bool:
    """The samplers one after the other, as a rolling upgrade does it."""
    return order.index("s1") == order.index("s0") + 1


class Run:
    """All processes of a run, and which configuration each has."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client, self.keys = client, keys
        self.trained: list[Any] = []
        self.samplers: dict[str, tuple[Sampler, asyncio.Task[None]]] = {}

    async def restart(self, service: str, temperature: int) -> None:
        if service == "controller":
            config = config_of(temperature)
            self.controller = Controller(self.client, self.keys, config, lambda item: [item + 1], 7)
        elif service == "trainer":
            batch = len({batch for _, batch, _ in self.trained})
            self.trainer = Trainer(self.client, self.keys, temperature, batch, self.trained)
        else:
            if service in self.samplers:
                await self.stop(service)
            config = config_of(temperature)
            engine: Any = Engine(config)
            rewards: Any = Rewards()
            made = Sampler(self.client, self.keys, config, engine, rewards, lambda ids: "", service)
            self.samplers[service] = made, asyncio.create_task(made.run())

    async def stop(self, name: str) -> None:
        sampler, task = self.samplers.pop(name)
        sampler.stop()
        await task

    async def go_on(self, until: Callable[[], bool], passes: int = 400) -> bool:
        for _ in range(passes):
            if until():
                return True
            await asyncio.to_thread(self.controller.tick)
            await asyncio.to_thread(self.trainer.step)
            for _, task in self.samplers.values():
                assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
        return until()


ORDERS = list(permutations(["controller", "trainer", "s0", "s1"]))


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(order, id="-".join(order), marks=[] if is_usual(order) else [pytest.mark.slow])
        for order in ORDERS
    ],
)
async def test_an_upgrade_never_mixes_two_configurations_in_a_batch(
    client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...]
) -> None:
    monkeypatch.setattr(serve, "READ_S", 0.05)
    monkeypatch.setattr("leeway_trainer.feed.POLL_S", 0.01)
    monkeypatch.setattr("leeway_sampler.watch.RETRY_S", 0.05)
    monkeypatch.setattr("leeway_sampler.tickets.SETTLE_S", 0.05)
    run = Run(client, keys)
    for service in order:
        await run.restart(service, OLD)
    assert await run.go_on(lambda: len(run.trained) >= 2)
    for service in order:
        await run.restart(service, NEW)
        await run.go_on(lambda: False, passes=10)
    assert await run.go_on(lambda: run.trainer.batch == STEPS), run.controller.state
    for temperature, batch, tokens in run.trained:
        assert tokens == {temperature}, f"batch {batch} of the trainer with {temperature} contains {tokens}"
    assert {batch for _, batch, _ in run.trained} == set(range(STEPS))
    assert run.trained[-1][0] == NEW
    for name in list(run.samplers):
        await run.stop(name)


async def test_whoever_was_left_behind_says_so_and_recovers(
    client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "READ_S", 0.05)
    monkeypatch.setattr("leeway_trainer.feed.POLL_S", 0.01)
    run = Run(client, keys)
    for service in ("controller", "s0"):
        await run.restart(service, OLD)
    await run.restart("trainer", NEW)

    def refused() -> bool:
        (status,) = read_statuses(client, keys, budget_s=5) or [None]
        return status is not None and bool(status.config_differs)

    assert await run.go_on(refused)
    (status,) = read_statuses(client, keys, budget_s=5)
    old, new = (identify(config_of(which)).digest[:8] for which in (OLD, NEW))
    assert not status.ready
    assert status.config_differs == ["sampling.temperature"]
    assert f"it has configuration {old}, run epoch 1 has {new} (differs in sampling.temperature)" in str(
        status.error
    )
    assert client.xlen(keys.tickets) == 0
    events = [event for event in EventTail(client, keys).read() if event.name == CONFIG_DIFFERS]
    assert sorted(event.source for event in events) == ["controller", "s0"]
    await run.restart("trainer", OLD)
    assert await run.go_on(lambda: len(run.trained) == 2), "the run's configuration is theirs again"
    (status,) = read_statuses(client, keys, budget_s=5)
    assert (status.ready, status.error, status.config_differs) == (True, None, [])
    await run.stop("s0")


async def test_a_ticket_of_another_configuration_is_handed_back_and_its_rollout_void(
    client: redis.Redis, keys: Keys
) -> None:
    """Whoever lets one through, the next one notices: here the sampler and the trainer alone."""
    run = Run(client, keys)
    await run.restart("trainer", NEW)
    old = config_of(OLD)
    engine: Any = Engine(old)
    engine.weights.loaded = Loaded(1, 0, "digest")
    rewards: Any = Rewards()
    sampler = Sampler(client, keys, old, engine, rewards, lambda ids: "", "s0")
    sampler.watcher.wanted = (1, 0)
    sampler.watcher.ready.set()
    config = identify(config_of(NEW)).digest
    tickets = plan_tickets(
        [3, 4],
        [[4], [5]],
        seed=0,
        epoch=1,
        version=0,
        batch=0,
        group_size=GROUP,
        max_new_tokens=8,
        config=config,
    )
    for ticket in tickets:
        append(client, keys.tickets, ticket)
    for _ in range(5):
        await sampler.worker.accept(await sampler.pending.read(10, 0.1))
    assert client.xlen(keys.tickets) == len(tickets)
    assert client.xlen(keys.rollouts) == 0
    summary: Any = client.xpending(keys.tickets, TICKETS_GROUP)
    assert summary["pending"] == 0
    generation = await engine.generate()
    for ticket in tickets:
        foreign = replace(ticket, header=ticket.header.model_copy(update={"config": "other"}))
        reward = RewardResult(1.0)
        made = build_rollout(foreign, generation, reward, sampler="s9", generate_s=0.0)
        append(client, keys.rollouts, made)
    run.trainer.step()
    assert run.trained == []
    assert run.trainer.epoch.feed is not None
    assert len(run.trainer.epoch.feed.assembler.awaited()) == len(tickets)
    texts = [event.text for event in EventTail(client, keys).read() if event.name == CONFIG_DIFFERS]
    assert len(texts) == 1
    assert "rollouts of sampler s9 are void: they were drawn under configuration other" in texts[0]
