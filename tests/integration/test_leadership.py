"""Two controllers of one run: only the newer one writes, and nothing that the older one took is lost."""

from __future__ import annotations

import pytest
import redis

from leeway.messages import Report, ReportHeader
from leeway.streams import Keys, append

from .test_controller import Play


@pytest.fixture
def play(client: redis.Redis, keys: Keys) -> Play:
    return Play(client, keys, max_lead=0)


def test_an_older_controller_can_write_nothing(play: Play) -> None:
    from leeway_controller.store import DeposedError

    play.started()
    assert play.batches() == [(0, 1)]
    older, play.controller = play.controller, play.fresh_controller()
    append(play.client, play.keys.reports, report(0))
    with pytest.raises(DeposedError, match="replaced"):
        older.tick()
    assert play.verdicts() == [] and play.batches() == []


def test_a_report_that_the_older_one_took_is_answered_by_the_newer(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play.started()
    older = play.controller
    newer = play.fresh_controller()
    newer.tick()  # has claimed what there was
    append(play.client, play.keys.reports, report(0))
    assert len(older.reports.consumer.read(10, 0.1)) == 1, "the older one takes it and dies"
    monkeypatch.setattr("leeway_controller.reports.CLAIM_EVERY_S", 0.01)
    for _ in range(20):
        newer.tick(block_s=0.05)
    assert [v.step for v in play.verdicts()] == [0]
    assert newer.state.next_step == 1


def test_a_write_survives_changes_of_other_fields(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer counts epochs in the same hash."""
    play.started()
    original = play.controller.store.commit
    touched = []

    def commit(state: object, effects: object = lambda pipe: None) -> None:
        def interfere(pipe: object) -> None:
            if not touched:
                touched.append(play.client.hset(play.keys.state, "another field", "1"))
            effects(pipe)  # type: ignore[operator]

        original(state, interfere)  # type: ignore[arg-type]

    monkeypatch.setattr(play.controller.store, "commit", commit)
    play.report("step", 0, 1)
    assert touched and play.controller.state.next_step == 1 and len(play.verdicts()) == 1


def test_a_run_that_is_finished_can_go_on_under_a_controller_that_stays(play: Play) -> None:
    from leeway_controller.reconcile import Controller

    config = play.config
    play.controller = Controller(play.client, play.keys, config, lambda item: [item + 1], 10, stay=True)
    play.started()
    play.report("finished", 6, 1)
    assert play.controller.state.finished
    play.controller.progress.at -= 10_000
    play.controller.tick()  # no progress is no stall now
    play.report("started", 3, 2, epoch=2)
    play.publish(2, 3, epoch=2)
    play.beat("a", 2, epoch=2)
    assert not play.controller.state.finished and (3, 2) in play.batches()


def test_a_sampler_whose_pod_is_gone_is_known_at_once(play: Play) -> None:
    play.started()
    play.beat("b", 1)
    play.controller.sampler_lost("b", "its pod was deleted")
    play.controller.sampler_lost("nobody", "its pod was deleted")
    play.controller.tick()
    assert [s.sampler for s in play.controller.samplers.statuses()] == ["a"]
    assert play.events().count("sampler_lost") == 1


def report(step: int) -> Report:
    metrics = {"lag/ess_tok": 0.99, "lag/ess_seq": 0.9, "lag/clip_fraction": 0.0}
    header = ReportHeader(event="step", epoch=1, step=step, version=1, age=1, metrics=metrics)
    return Report(header)
