"""Tickets of samplers that died: they are drawn alone, and the one that kills its sampler is named.

Real Redis. The engine is a double, because what matters here is how it dies.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from leeway.config import RunConfig
from leeway.config.identity import identify
from leeway.errors import EXIT_POISONED
from leeway.messages import Event, Rollout, Ticket, TicketHeader, decode, encode
from leeway.rewards import RewardResult
from leeway.streams import TICKETS_GROUP, Consumer, Tail, add_fields
from leeway_sampler.generation import Generation
from leeway_sampler.serve import Sampler
from leeway_sampler.suspects import PoisonedTicketError
from leeway_sampler.weight_update import Loaded

CONFIG = RunConfig.model_validate(
    {"task": {"kind": "digits"}, "sampler": {"max_deliveries": 3}, "checks": {"probe_draws": 0}}
)

DIGEST = identify(CONFIG).digest


class Engine:
    """Answers after a moment, and remembers which tickets were in progress at the same time."""

    version = 1
    weights = SimpleNamespace(loaded=Loaded(0, 1, "d"))

    def __init__(self, seconds: float = 0.05) -> None:
        self.seconds, self.working, self.together = seconds, set(), []

    def healthy(self):
        return True

    async def generate(self, request_id, prompt_ids, seed, max_new_tokens):
        self.working.add(request_id)
        self.together.append(set(self.working))
        await asyncio.sleep(self.seconds)
        self.working.discard(request_id)
        ids = np.array([3, 4], np.int32)
        logp = np.array([-1.0, -2.0], np.float32)
        return Generation(ids, logp, np.array([0, 1, 2], np.int32), ids, logp, "stop", ((0, 2, 1),), False)


class Rewards:
    async def score(self, item, text):
        return RewardResult(1.0)


def sampler(client, keys, engine, name="s0"):
    made = Sampler(client, keys, CONFIG, engine, Rewards(), lambda ids: "", name)
    made.watcher.wanted = (0, 1)
    made.watcher.ready.set()
    return made


def tickets(client, keys, count):
    for index in range(count):
        header = TicketHeader(
            ticket_id=f"t{index}", epoch=0, version=1, batch=0, group=0, index=index, item=index, seed=index,
            max_new_tokens=8, config=DIGEST,
        )  # fmt: skip
        add_fields(client, keys.tickets, encode(Ticket(header, np.array([5], np.int32))))


def die_with(client, keys, times, name="s0"):
    """`times` samplers read every ticket and die."""
    for _ in range(times):
        Consumer(client, keys.tickets, TICKETS_GROUP, name).read(100, 0.1)


async def settle(made):
    while made.worker.tasks:
        await asyncio.wait(made.worker.tasks)


def answered(client, keys):
    return [
        decode(Rollout, e.fields).header.ticket_id for e in Tail(client, keys.rollouts).read(block_s=None)
    ]


async def test_after_one_or_two_deaths_tickets_are_drawn_together(client, keys):
    tickets(client, keys, 4)
    die_with(client, keys, 1)
    engine = Engine()
    again = sampler(client, keys, engine)
    await again.worker.accept(await again.pending.read(10, 0.1))
    await settle(again)
    assert max(map(len, engine.together)) == 4
    assert sorted(answered(client, keys)) == ["t0", "t1", "t2", "t3"]


async def test_after_more_deaths_each_is_drawn_alone_and_the_innocent_are_answered(client, keys):
    tickets(client, keys, 4)
    die_with(client, keys, 2)
    engine = Engine()
    third = sampler(client, keys, engine)
    await third.worker.accept(await third.pending.read(10, 0.1))
    assert max(map(len, engine.together)) == 1
    assert answered(client, keys) == ["t0", "t1", "t2", "t3"]
    assert client.hlen(keys.suspects) == 0


async def test_the_ticket_that_kills_is_named_and_no_other(client, keys):
    tickets(client, keys, 3)
    die_with(client, keys, 2)
    third = sampler(client, keys, Engine())
    await third.worker.accept(await third.pending.read(1, 0.1))  # t0 is innocent
    slow = sampler(client, keys, Engine(seconds=60))
    accepting = asyncio.create_task(slow.worker.accept(await slow.pending.read(10, 0.1)))
    for _ in range(500):
        if client.hlen(keys.suspects):
            break
        await asyncio.sleep(0.01)
    accepting.cancel()  # dies with t1 in progress and t2 waiting
    for task in slow.worker.tasks:
        task.cancel()
    last = sampler(client, keys, Engine())
    entries = await last.pending.read(10, 0.1)
    with pytest.raises(PoisonedTicketError, match=r"ticket t1 \(item 1 .* handed out 3 times") as caught:
        await last.worker.accept(entries)
    assert caught.value.exit_code == EXIT_POISONED
    events = [decode(Event, e.fields).header for e in Tail(client, keys.events).read(block_s=None)]
    assert [e.name for e in events] == ["ticket_poisoned"]
    assert answered(client, keys) == ["t0"]
    assert client.xlen(keys.tickets) == 2, "t1 and t2 are still there: nothing is dropped"


async def test_a_sampler_that_is_told_to_stop_hands_suspects_back(client, keys):
    tickets(client, keys, 2)
    die_with(client, keys, 2)
    third = sampler(client, keys, Engine())
    third.stop()
    await third.worker.accept(await third.pending.read(10, 0.1))
    await third._drain()
    assert client.xlen(keys.tickets) == 2
    assert client.xpending(keys.tickets, TICKETS_GROUP)["pending"] == 0
