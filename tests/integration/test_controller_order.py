"""The controller when messages come late, twice or in another order, and when the server loses its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from leeway.messages import Report, ReportHeader
from leeway.streams import Entry, Keys, append
from leeway_controller.store import DeposedError

from .test_controller import Play


def test_a_trainer_that_decided_alone_is_followed(client: redis.Redis, keys: Keys) -> None:
    play = Play(client, keys)
    play.started()
    play.batches()
    play.publish(2, 1)  # before any report reached the controller
    play.report("step", 0, 1)
    play.beat("a", 2)
    assert play.batches() == [(1, 2), (2, 2)]


def test_a_verdict_that_comes_after_the_version_it_asks_for_awaits_nothing(
    client: redis.Redis, keys: Keys
) -> None:
    play = Play(client, keys)
    play.started()
    play.batches()
    play.publish(2, 1)  # the controller was paused: the trainer had no verdict, and decided alone
    play.report("step", 0, 1, lag__ess_tok=0.1)
    assert [v.action for v in play.verdicts()] == ["resync"]
    play.beat("a", 2)
    assert play.batches() == [(1, 2), (2, 2)]
    play.report("step", 1, 2)
    assert play.batches() == [(3, 2)]


def test_a_server_that_came_back_empty_and_a_trainer_that_starts_over(
    client: redis.Redis, keys: Keys
) -> None:
    play = Play(client, keys)
    for epoch in (1, 2, 3):  # two restarts
        play.report("started", 0, 1, epoch=epoch)
    client.flushall()
    play.verdict_tail.last_id = play.ticket_tail.last_id = "0"
    play.report("started", 0, 1, epoch=1)  # without a checkpoint: its count starts over, too
    play.publish(1, 0)
    play.beat("a", 1)
    assert play.batches() == [(0, 1), (1, 1)]
    assert play.events() == ["state_lost", "sampler_joined"]
    play.report("step", 0, 1)
    assert [v.epoch for v in play.verdicts()] == [1]


def test_data_that_is_lost_in_the_middle_of_a_pass(
    client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Play(client, keys)
    play.started()
    read = play.controller.reports.read

    def lose(block_s: float) -> list[Entry]:
        client.flushall()
        header = ReportHeader(event="started", epoch=1, step=0, version=1, config=play.digest)
        append(client, keys.reports, Report(header))
        return read(block_s)

    monkeypatch.setattr(play.controller.reports, "read", lose)
    play.controller.tick()
    play.ticket_tail.last_id = "0"
    play.publish(1, 0)
    play.beat("a", 1)
    assert play.batches() == [(0, 1), (1, 1)]


def test_an_older_controller_does_not_take_over_a_server_that_lost_its_data(
    client: redis.Redis, keys: Keys
) -> None:
    play = Play(client, keys)
    old = play.controller
    play.controller = play.fresh_controller()
    play.started()
    client.flushall()
    play.controller.tick()
    with pytest.raises(DeposedError):
        old.tick()


def merges(*histories: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All ways to interleave histories, each in its own order."""
    if not any(histories):
        yield ()
    for index, history in enumerate(histories):
        if history:
            rest = (*histories[:index], history[1:], *histories[index + 1 :])
            yield from ((history[0], *others) for others in merges(*rest))


def test_the_order_in_which_streams_are_read_changes_nothing(client: redis.Redis, keys: Keys) -> None:
    """Reports, manifests and statuses in every order, also those that only pauses bring about."""
    ends: dict[str, list[tuple[str, ...]]] = {}
    orders = list(merges(("started", "step 0", "step 1"), ("publish 1", "publish 2"), ("attest 2",)))
    assert len(orders) == 60
    for order in orders:
        client.flushall()
        play = Play(client, keys, max_lead=1)
        digests = Play(client, Keys("elsewhere"))
        for version, step in ((1, 0), (2, 1)):
            digests.publish(version, step)
        play.digests.update(digests.digests)
        do: dict[str, Callable[[], None]] = {
            "started": lambda p=play: p.report("started", 0, 1),
            "step 0": lambda p=play: p.report("step", 0, 1, lag__ess_tok=0.1),
            "step 1": lambda p=play: p.report("step", 1, 2),
            "publish 1": lambda p=play: p.publish(1, 0),
            "publish 2": lambda p=play: p.publish(2, 1),
            "attest 2": lambda p=play: p.beat("a", 2),
        }
        for event in order:
            do[event]()
        for event in ("step 1", "step 0", "started"):  # repeated, and late
            do[event]()
        state = play.controller.state.model_copy(update={"pending_since": 0.0})
        ends.setdefault(state.model_dump_json(), []).append(order)
        assert [batch for batch, version in play.batches() if version == 2][-2:] == [2, 3], order
    assert len(ends) == 1, {end: found[0] for end, found in ends.items()}
