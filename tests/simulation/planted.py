"""Plants one bug in the real services and looks for a history that shows it: `python planted.py NAME SEEDS`.

Each bug takes out one mechanism that docs/invariants.md names. Prints the seed that found it, or nothing;
with `show` instead of a number, what `leeway chaos --simulate` prints.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import leeway.streams.authority as authority
import leeway.weights.publish as publish
import leeway_controller.store as store
import leeway_trainer.feed as feed
from leeway.streams import PUBLISHED_FIELD, Consumer, newest_start, retrying
from leeway.weights import parse_manifest
from leeway_controller.store import StateStore
from leeway_sampler.pending import PendingTickets
from leeway_sampler.watch import WeightWatcher
from leeway_simulation.__main__ import app
from leeway_simulation.campaign import run_history, simulated_server
from leeway_simulation.observer import Observer
from leeway_trainer.assemble import BatchAssembler


def drop_the_watch_of_the_trainer() -> None:
    """The epoch is checked, and then the effects are written, whatever has happened in between."""

    def write(client: Any, keys: Any, epoch: int, queue: Any, *, budget_s: float, what: str) -> None:
        def execute() -> None:
            authority._check_owner(newest_start(client, keys), epoch)
            with client.pipeline(transaction=True) as pipe:
                queue(pipe)
                pipe.execute()

        retrying(execute, budget_s=budget_s, what=what)

    publish.write_in_epoch = feed.write_in_epoch = write


def drop_the_watch_of_the_controller() -> None:
    """The same with the controller's term."""

    def write(self: Any, state: Any, effects: Any, check: Any) -> None:
        check(int(self.client.hget(self.keys.state, store.TERM_FIELD) or 0))
        with self.client.pipeline(transaction=True) as pipe:
            effects(pipe)
            pipe.hset(self.keys.state, store.STATE_FIELD, state.model_dump_json())
            pipe.execute()

    StateStore._write = write  # type: ignore[method-assign]


def take_the_last_manifest() -> None:
    """Manifests come in order of arrival, and samplers load the last one, also of a replaced trainer."""
    drop_the_watch_of_the_trainer()
    Observer._check_trainer = lambda *_: None  # type: ignore[method-assign]  # it would see the write itself

    def announce(client: Any, keys: Any, manifest: Any, budget_s: float) -> None:
        fields = {publish.MANIFEST_FIELD: manifest.model_dump_json()}

        def effects(pipe: Any) -> None:
            pipe.xadd(keys.weights, fields)
            pipe.hset(keys.state, PUBLISHED_FIELD, f"{manifest.epoch}.{manifest.version}")

        publish.write_in_epoch(client, keys, manifest.epoch, effects, budget_s=budget_s, what="publishing")

    async def newest(self: Any, wait_s: float) -> Any:
        import asyncio

        entries = await asyncio.to_thread(self._tail.read, 100, wait_s)
        if not entries:
            return None
        manifest = parse_manifest(entries[-1].fields)
        self.wanted = manifest.key
        return manifest

    publish._announce = announce
    WeightWatcher._newest = newest  # type: ignore[method-assign]


def forget_lost_replies() -> None:
    """Entries whose delivery was lost with a connection are not looked for."""
    Consumer._find_unreturned = lambda self, count: []  # type: ignore[method-assign]


def acknowledge_before_the_effect() -> None:
    """A ticket is acknowledged in one call, and its rollout is written in the next."""

    async def commit(self: Any, entries: Any, what: str, effects: Any) -> None:
        import asyncio

        ids = [entry.id for entry in entries]

        def write() -> None:
            with self.client.pipeline(transaction=True) as pipe:
                effects(pipe)
                pipe.execute()

        await asyncio.to_thread(self._consumer.ack, ids)
        await asyncio.to_thread(retrying, write, budget_s=self.budget_s, what=what)
        for entry_id in ids:
            self._held.pop(entry_id, None)

    PendingTickets._commit = commit  # type: ignore[method-assign]


def ignore_the_epoch() -> None:
    """Rollouts of an earlier start of the trainer count, if their version has the right number."""
    add = BatchAssembler.add

    def adding(self: Any, rollout: Any) -> Any:
        header = rollout.header.model_copy(update={"epoch": self.epoch})
        return add(self, type(rollout)(header, *(getattr(rollout, name) for name in rollout.arrays)))

    BatchAssembler.add = adding  # type: ignore[method-assign]


BUGS = {
    plant.__name__: plant
    for plant in (
        drop_the_watch_of_the_trainer,
        drop_the_watch_of_the_controller,
        take_the_last_manifest,
        forget_lost_replies,
        acknowledge_before_the_effect,
        ignore_the_epoch,
    )
}


def main(name: str, seeds: str) -> None:
    BUGS[name]()
    if seeds == "show":
        app(["--seeds", "30"])
    with simulated_server() as server:
        for seed in range(int(seeds)):
            outcome = run_history(server, seed)
            if outcome.problems:
                print(json.dumps({"seed": seed, "problem": outcome.problems[0]}))
                return


if __name__ == "__main__":
    assert os.environ["PYTHONHASHSEED"] == "0"
    main(sys.argv[1], sys.argv[2])
