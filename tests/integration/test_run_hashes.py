"""What services write about themselves and others read: statuses, events, the run's state."""

from __future__ import annotations

import json
import time

import pytest
import redis

from leeway.config.identity import identify
from leeway.config.load import build_config
from leeway.events import EventTail, EventWriter, read_recent_events
from leeway.messages import MessageError, SamplerStatus
from leeway.run_state import RunState
from leeway.statuses import read_statuses, remove_status, split_live, write_status
from leeway.streams import STATE_FIELD, Keys, connect, now, set_clock
from leeway_controller.state import ControllerState
from leeway_controller.store import StateStore
from leeway_host.redis_server import EmbeddedRedis
from leeway_host.status import as_json, describe, read_status
from leeway_trainer.epochs import count_epoch

CONFIG = build_config({"task": {"kind": "digits"}})
IDENTITY = identify(CONFIG)


def status(name: str, **change: object) -> SamplerStatus:
    return SamplerStatus(sampler=name, heartbeat=now(), **change)  # type: ignore[arg-type]


def test_statuses_are_read_as_they_were_written(client: redis.Redis, keys: Keys) -> None:
    written = [status("a", ready=True, version=3, stuck=(1, 2)), status("b")]
    for one in reversed(written):
        write_status(client, keys, one, budget_s=5)
    assert read_statuses(client, keys, budget_s=5) == written
    remove_status(client, keys, "a", budget_s=5)
    assert read_statuses(client, keys, budget_s=5) == written[1:]
    client.hset(keys.samplers, "c", "{}")
    with pytest.raises(MessageError, match="sampler status: "):
        read_statuses(client, keys, budget_s=5)


def test_heartbeats_follow_the_clock_of_the_server(
    redis_server: EmbeddedRedis, client: redis.Redis, keys: Keys
) -> None:
    def wrong_clock(seconds: int) -> None:
        set_clock((int(time.time()) + seconds, 0))

    wrong_clock(-3600)
    connect(redis_server.url).close()
    assert now() == pytest.approx(time.time(), abs=2)
    wrong_clock(-3600)
    write_status(client, keys, status("slow clock"), budget_s=5)  # its first heartbeat
    write_status(client, keys, status("slow clock"), budget_s=5)
    wrong_clock(3600)
    (seen,) = read_statuses(client, keys, budget_s=5)
    assert split_live([seen], now(), 2.0) == ([seen], [])


def test_events_are_followed_and_found_by_their_age(client: redis.Redis, keys: Keys) -> None:
    tail = EventTail(client, keys, budget_s=5)
    assert tail.read() == []
    EventWriter(client, keys, "controller", budget_s=5).write("warning", "lost", "a is lost", sampler="a")
    (event,) = tail.read()
    assert (event.level, event.source, event.name, event.data) == (
        "warning",
        "controller",
        "lost",
        {"sampler": "a"},
    )
    assert tail.read() == []
    assert read_recent_events(client, keys, 60, budget_s=5) == [event]
    assert read_recent_events(client, keys, -60, budget_s=5) == []


def test_the_state_that_the_controller_commits_is_what_the_status_shows(
    client: redis.Redis, keys: Keys
) -> None:
    assert not read_status(client, keys).known
    assert RunState.load(client, keys, budget_s=5) == RunState()
    store = StateStore(client, keys, identity=IDENTITY, budget_s=5)
    store.commit(ControllerState(epoch=2, next_step=7, current=3, pending=4))
    write_status(client, keys, status("a", ready=True, version=3), budget_s=5)
    shown = read_status(client, keys)
    assert (shown.epoch, shown.step, shown.current, shown.pending, shown.awaiting) == (2, 7, 3, 4, None)
    assert shown.going
    text = "\n".join(describe(shown, None))
    assert "training, 7 steps done (run epoch 2)" in text
    assert "weights: version 3; samplers are loading version 4" in text
    assert StateStore(client, keys, identity=IDENTITY, budget_s=5).state == store.state


def test_the_status_names_who_has_another_configuration(client: redis.Redis, keys: Keys) -> None:
    other = identify(build_config({"task": {"kind": "digits"}, "sampling": {"temperature": 0.5}}))
    count_epoch(client, keys, -1, other, 5)
    StateStore(client, keys, identity=IDENTITY, budget_s=5)
    write_status(client, keys, status("a", config=other.digest), budget_s=5)
    write_status(
        client, keys, status("b", config=IDENTITY.digest, config_differs=["sampling.temperature"]), budget_s=5
    )
    shown = read_status(client, keys)
    run, own = other.digest[:8], IDENTITY.digest[:8]
    lines = [line for line in describe(shown, None) if run in line or own in line]
    assert lines == [
        f"configuration: {run} (the trainer's)",
        f"the controller has {own} (differs in sampling.temperature) and issues no tickets",
        f"sampler b has {own} (differs in sampling.temperature) and takes no tickets",
    ]
    data = json.loads(as_json(shown, None))["run"]
    assert (data["config"], data["controller_config"]) == (other.digest, IDENTITY.digest)


def test_a_state_of_another_version_is_named(client: redis.Redis, keys: Keys) -> None:
    client.hset(keys.state, STATE_FIELD, '{"epoch": 1, "colour": "red"}')
    with pytest.raises(MessageError, match=rf"state of run {keys.run}: .*colour.* another version of Leeway"):
        RunState.load(client, keys, budget_s=5)
