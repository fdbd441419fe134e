"""Tickets of samplers that died: they are drawn alone, and the one that kills its sampler is named.

Real Redis. The engine is a double, because what matters here is how its process dies.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from leeway.config import RunConfig
from leeway.config.identity import identify
from leeway.errors import EXIT_POISONED
from leeway.incarnations import forget_sampler, new_holder, register
from leeway.messages import Event, Rollout, SamplerStatus, Ticket, TicketHeader, decode, encode
from leeway.rewards import RewardResult
from leeway.statuses import remove_status, write_status
from leeway.streams import TICKETS_GROUP, Consumer, Tail, add_fields, now
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

    version, drawn, inflight = 1, 0, 0
    weights = SimpleNamespace(loaded=Loaded(0, 1, "d"), pausing=False)

    def __init__(self, seconds: float = 0.05) -> None:
        self.seconds, self.working, self.together = seconds, set(), []

    def healthy(self):
        return True

    async def abort_all(self):
        pass

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


def sampler(client, keys, engine=None, name="s0"):
    """A process of sampler `name` that has started."""
    made = Sampler(client, keys, CONFIG, engine or Engine(), Rewards(), lambda ids: "", name)
    register(client, keys, made.holder, budget_s=5)
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


async def take(made, count=10):
    """What a sampler reads, and takes over from others at once."""
    return [*await made.pending.take_over(0.0, count), *await made.pending.read(count, 0.05)]


async def die_with(client, keys, times, name="s0"):
    """`times` processes of a sampler take every ticket and die; the next one is starting."""
    for _ in range(times):
        await take(sampler(client, keys, name=name))
    register(client, keys, new_holder(name), budget_s=5)


async def settle(made):
    while made.worker.tasks:
        await asyncio.wait(made.worker.tasks)


def answered(client, keys):
    return [
        decode(Rollout, e.fields).header.ticket_id for e in Tail(client, keys.rollouts).read(block_s=None)
    ]


async def test_after_one_death_tickets_are_drawn_together(client, keys):
    tickets(client, keys, 4)
    await die_with(client, keys, 1)
    engine = Engine()
    again = sampler(client, keys, engine)
    await again.worker.accept(await take(again))
    await settle(again)
    assert max(map(len, engine.together)) == 4
    assert sorted(answered(client, keys)) == ["t0", "t1", "t2", "t3"]
    assert client.hlen(keys.suspects) == 0


async def test_after_more_deaths_each_is_drawn_alone_and_the_innocent_are_answered(client, keys):
    tickets(client, keys, 4)
    await die_with(client, keys, 2)
    engine = Engine()
    third = sampler(client, keys, engine)
    await third.worker.accept(await take(third))
    assert max(map(len, engine.together)) == 1
    assert answered(client, keys) == ["t0", "t1", "t2", "t3"]
    assert client.hlen(keys.suspects) == 0


async def draws_alone(client, keys, made):
    """`made` has begun to draw a ticket alone."""
    accepting = asyncio.create_task(made.worker.accept(await take(made)))
    for _ in range(500):
        marks = client.hgetall(keys.suspects)
        if any(k.decode().endswith(made.holder) and v.startswith(b"alone") for k, v in marks.items()):
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail(f"no mark of {made.holder} in {marks}")
    return accepting


def kill(made, accepting):
    accepting.cancel()
    for task in made.worker.tasks:
        task.cancel()


async def test_the_ticket_that_kills_is_named_and_no_other(client, keys):
    tickets(client, keys, 3)
    await die_with(client, keys, 2)
    third = sampler(client, keys, name="s1")
    await third.worker.accept(await take(third, 1))  # t0 is innocent
    slow = sampler(client, keys, Engine(seconds=60))
    kill(slow, await draws_alone(client, keys, slow))  # dies with t1 in progress and t2 waiting
    last = sampler(client, keys)
    entries = await take(last)
    with pytest.raises(
        PoisonedTicketError, match=r"ticket t1 \(item 1 .* with 3 samplers that died"
    ) as caught:
        await last.worker.accept(entries)
    assert caught.value.exit_code == EXIT_POISONED
    events = [decode(Event, e.fields).header for e in Tail(client, keys.events).read(block_s=None)]
    assert [(e.name, e.source) for e in events] == [("ticket_poisoned", "s0")]
    assert answered(client, keys) == ["t0"]
    assert client.xlen(keys.tickets) == 2, "t1 and t2 are still there: nothing is dropped"


async def test_samplers_that_are_stopped_and_go_on_are_no_deaths(client, keys):
    """Every sampler is stopped beyond every idle time, again and again, also while it draws alone."""
    tickets(client, keys, 3)
    stopped = [sampler(client, keys, name=f"s{number}") for number in range(5)]
    for made in stopped:
        assert len(await take(made)) == 3
        remove_status(client, keys, made.name, budget_s=5)  # the controller saw no heartbeat
    held = []
    for number in range(5):
        slow = sampler(client, keys, Engine(seconds=60), name=f"alone{number}")
        held.append((slow, await draws_alone(client, keys, slow)))
    engine = Engine()
    last = sampler(client, keys, engine, name="s10")
    await last.worker.accept(await take(last))
    assert answered(client, keys) == ["t0", "t1", "t2"]
    assert max(map(len, engine.together)) == 1
    for slow, accepting in held:
        kill(slow, accepting)
    assert client.hlen(keys.suspects) == 0


async def test_a_sampler_that_beats_again_is_no_longer_missing(client, keys):
    tickets(client, keys, 1)
    stopped = [sampler(client, keys, name=f"s{number}") for number in range(3)]
    for made in stopped:
        await take(made)
    last = sampler(client, keys, name="last")
    await take(last)
    assert len((await last.worker.suspects.histories(["t0"], (0, 1)))["t0"].missing) == 3
    for made in stopped[:2]:
        status = SamplerStatus(sampler=made.name, heartbeat=now())
        write_status(client, keys, status, budget_s=5, holder=made.holder)
    history = (await last.worker.suspects.histories(["t0"], (0, 1)))["t0"]
    assert (history.missing, history.deaths) == ([stopped[2].holder], [])
    register(client, keys, new_holder("s0"), budget_s=5)  # beats, but as another process
    history = (await last.worker.suspects.histories(["t0"], (0, 1)))["t0"]
    assert (history.missing, history.deaths) == ([stopped[0].holder, stopped[2].holder], [stopped[0].holder])


async def test_a_sampler_that_is_gone_for_good_is_a_death(client, keys):
    tickets(client, keys, 1)
    for number in range(2):
        await die_with(client, keys, 1, name=f"pod-{number}")
        forget_sampler(client, keys, f"pod-{number}", budget_s=5)  # the controller saw its pod deleted
    slow = sampler(client, keys, Engine(seconds=60), name="pod-2")
    kill(slow, await draws_alone(client, keys, slow))
    forget_sampler(client, keys, "pod-2", budget_s=5)
    last = sampler(client, keys, name="pod-3")
    with pytest.raises(PoisonedTicketError, match="ticket t0"):
        await last.worker.accept(await take(last))


async def test_a_sampler_that_leaves_in_good_order_is_no_death(client, keys):
    tickets(client, keys, 1)
    first = sampler(client, keys, name="s1")
    await take(first)
    second = sampler(client, keys, name="s2")
    await take(second)  # the first was stopped for a while
    await first._leave()
    await second.pending.hand_back(second.pending.held, cut=True)
    await second._leave()
    third = sampler(client, keys, name="s3")
    (entry,) = await take(third)
    histories = await third.worker.suspects.histories(["t0"], (0, 1))
    assert (histories["t0"].deaths, histories["t0"].missing) == ([], [])
    assert list(histories["t0"].marks.values()) == ["cut"]
    await third.worker.accept([entry])
    await settle(third)
    assert answered(client, keys) == ["t0"]
    assert client.hlen(keys.suspects) == 0


async def test_marks_of_older_versions_are_removed(client, keys):
    tickets(client, keys, 2)
    await die_with(client, keys, 2)
    made = sampler(client, keys)
    await made.worker.suspects.histories([], (0, 1))
    assert client.hlen(keys.suspects) == 2
    await made.worker.suspects.histories([], (0, 2))
    assert client.hlen(keys.suspects) == 0


async def test_a_sampler_that_is_told_to_stop_hands_suspects_back(client, keys):
    tickets(client, keys, 2)
    await die_with(client, keys, 2)
    third = sampler(client, keys)
    third.stop()
    await third.worker.accept(await take(third))
    await third._drain()
    assert client.xlen(keys.tickets) == 2
    assert client.xpending(keys.tickets, TICKETS_GROUP)["pending"] == 0


async def test_a_ticket_that_was_deleted_while_it_was_pending_is_dropped(client, keys):
    tickets(client, keys, 1)
    dead = Consumer(client, keys.tickets, TICKETS_GROUP, "s0:dead")
    (entry,) = dead.read(1, 0.1)
    client.xdel(keys.tickets, entry.id)
    made = sampler(client, keys)
    assert await take(made) == []
    assert client.xpending(keys.tickets, TICKETS_GROUP)["pending"] == 0
