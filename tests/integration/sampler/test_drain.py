"""The end of a sampler: responses in progress are finished, whatever their length; what is cut is told."""

from __future__ import annotations

from test_suspects import CONFIG, Engine, Rewards, settle, take, tickets

from leeway.events import EventTail
from leeway.messages import Rollout, decode
from leeway.streams import TICKETS_GROUP, Tail
from leeway_sampler.serve import Sampler


class Lengths(Engine):
    """Each response takes as many seconds as its seed says."""

    def __init__(self, seconds):
        super().__init__()
        self.lengths = seconds

    async def generate(self, request_id, prompt_ids, seed, max_new_tokens):
        self.seconds = self.lengths[seed]
        return await super().generate(request_id, prompt_ids, seed, max_new_tokens)


def sampler(client, keys, seconds, drain_s=0.5, name="s0"):
    config = CONFIG.model_copy(
        update={"sampler": CONFIG.sampler.model_copy(update={"drain_s": drain_s, "max_num_seqs": 8})}
    )
    made = Sampler(client, keys, config, Lengths(seconds), Rewards(), lambda ids: "", name)
    made.watcher.wanted = (0, 1)
    made.watcher.ready.set()
    return made


def answers(client, keys):
    found = [decode(Rollout, e.fields).header for e in Tail(client, keys.rollouts).read(block_s=None)]
    return {header.ticket_id: header.redraws for header in found}


async def drained(client, keys, made):
    await made.worker.accept(await take(made))
    made.stop()
    await made._drain()
    await made._leave()
    return [event for event in EventTail(client, keys).read() if event.name == "drain_cut"]


async def test_responses_are_finished_whatever_their_length(client, keys):
    tickets(client, keys, 3)
    made = sampler(client, keys, [0.01, 0.2, 0.6], drain_s=30.0)
    assert await drained(client, keys, made) == []
    assert answers(client, keys) == {"t0": 0, "t1": 0, "t2": 0}
    assert client.xlen(keys.tickets) == 0
    assert client.hlen(keys.suspects) == 0


async def test_what_is_cut_is_drawn_again_and_counted(client, keys):
    tickets(client, keys, 3)
    (event,) = await drained(client, keys, sampler(client, keys, [0.01, 60.0, 60.0]))
    assert event.level == "warning"
    assert "2 responses were not finished within sampler.drain_s=0.5" in event.text
    assert answers(client, keys) == {"t0": 0}
    assert client.xpending(keys.tickets, TICKETS_GROUP)["pending"] == 0
    _, again = await drained(client, keys, sampler(client, keys, [0.0, 0.01, 60.0], name="s1"))
    assert "1 responses were not finished" in again.text
    third = sampler(client, keys, [0.0, 0.0, 0.01], name="s2")
    await third.worker.accept(await take(third))
    await settle(third)
    assert answers(client, keys) == {"t0": 0, "t1": 1, "t2": 2}, "how many began it before"
    assert client.hlen(keys.suspects) == 0


async def test_a_cut_is_no_death(client, keys):
    tickets(client, keys, 1)
    for number in range(4):
        await drained(client, keys, sampler(client, keys, [60.0], drain_s=0.05, name=f"s{number}"))
    last = sampler(client, keys, [0.01], name="last")
    (entry,) = await take(last)
    history = (await last.worker.suspects.histories(["t0"], (0, 1)))["t0"]
    assert (len(history.marks), history.deaths) == (4, [])
    await last.worker.accept([entry])
    await settle(last)
    assert answers(client, keys) == {"t0": 4}
