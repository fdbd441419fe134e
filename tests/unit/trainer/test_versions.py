"""The state machine of versions: what is published when, what theta_s holds, and which moves are illegal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from leeway.config import ChecksConfig
from leeway.weights import WeightsTooLarge
from leeway_trainer.timing import StepTimes
from leeway_trainer.versions import State, Versions, VersionsError, kl_is_due


class Engines:
    """Stands in for policy, snapshot and transport: weights are numbers, and every call is noted."""

    def __init__(self) -> None:
        self.theta, self.theta_s = 0, -1
        self.full = False
        self.calls: list[tuple[object, ...]] = []

    def publish(self, version: int, step: int):
        if self.full:
            raise WeightsTooLarge("no room")
        self.calls.append(("publish", version, step, self.theta))
        return SimpleNamespace(wire_nbytes=8)

    def refresh(self, step: int) -> None:
        self.calls.append(("refresh", step))
        self.theta_s = self.theta

    def kl_of(self, rollouts):
        engines = self

        class Kl:
            def before(self) -> dict[str, float]:
                engines.calls.append(("before", len(rollouts), engines.theta_s, engines.theta))
                return {"kl/sampler_prefix": 0.5}

            def around(self, renew) -> dict[str, float]:
                old = engines.theta_s
                renew()
                engines.calls.append(("around", len(rollouts), old, engines.theta_s))
                return {"kl/self_prefix": 0.25}

        return Kl()


def batch(version: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(header=SimpleNamespace(version=version)) for _ in range(3)]


class Run:
    """A loop over the machine: `step` trains once."""

    def __init__(self, every: int = 4, version: int = 0, step: int = 0) -> None:
        self.engines, self.times = Engines(), StepTimes()
        checks = ChecksConfig(self_prefix_every=every)
        self.versions = Versions(
            self.engines, self.engines.kl_of, checks, self.times, version=version, step=step
        )
        self.steps = step

    def step(self):
        drawn = self.versions.open_batch(self.steps, batch(self.versions.version))
        self.engines.theta += 1
        self.steps += 1
        self.versions.close_batch(batch(drawn.version))
        return drawn

    def resync(self) -> None:
        self.versions.resync(self.steps)


def test_a_start_publishes_theta_and_settles() -> None:
    run = Run(version=3, step=7)
    assert run.versions.state is State.UNPUBLISHED
    run.versions.start()
    assert run.engines.calls == [("publish", 3, 7, 0), ("refresh", 7)]
    assert (run.versions.state, run.versions.version, run.versions.age(9)) == (State.SETTLED, 3, 2)


def test_a_measured_resync_keeps_the_old_weights_until_the_first_fresh_batch() -> None:
    run = Run()
    run.versions.start()
    run.step()
    run.engines.calls.clear()
    run.resync()
    assert run.engines.calls == [("before", 3, 0, 1), ("publish", 1, 1, 1)]
    assert (run.versions.state, run.engines.theta_s) == (State.STRADDLING, 0)
    drawn = run.step()
    assert run.engines.calls[2:] == [("refresh", 1), ("around", 3, 0, 1)]
    assert (drawn.version, drawn.age, run.versions.state) == (1, 0, State.SETTLED)
    assert drawn.kl == {"kl/sampler_prefix": 0.5, "kl/self_prefix": 0.25}
    assert run.step().kl == {}, "only the first batch of a version tells"


def test_a_resync_that_is_not_due_for_measuring_settles_at_once() -> None:
    run = Run(every=4)
    run.versions.start()
    for _ in range(2):
        run.step()
        run.resync()
        run.step()
    run.engines.calls.clear()
    run.resync()  # at step 4; the one at step 1 was measured
    assert run.engines.calls == [("publish", 3, 4, 4), ("refresh", 4)]
    assert run.versions.state is State.SETTLED
    run.step()
    run.resync()  # at step 5
    assert run.versions.state is State.STRADDLING


def test_a_resync_before_the_first_fresh_batch_settles_first() -> None:
    run = Run()
    run.versions.start()
    run.step()
    run.resync()
    run.engines.calls.clear()
    run.resync()
    assert run.engines.calls == [("refresh", 1), ("publish", 2, 1, 1), ("refresh", 1)]
    assert run.step().kl == {}


@pytest.mark.parametrize("every", [1, 100], ids=["measured", "not measured"])
def test_without_room_nothing_changes(every: int) -> None:
    run = Run(every=every)
    run.versions.start()
    run.step()
    run.resync()
    run.step()
    before = (run.versions.version, run.versions.published_at, run.engines.theta_s)
    run.engines.full = True
    with pytest.raises(WeightsTooLarge, match="no room"):
        run.resync()
    assert (run.versions.version, run.versions.published_at, run.engines.theta_s) == before
    assert run.versions.state is State.SETTLED
    assert run.step().age == 1


@pytest.mark.parametrize("straddling", [False, True])
def test_a_new_epoch_publishes_the_next_version_in_full(straddling: bool) -> None:
    run = Run()
    run.versions.start()
    run.step()
    if straddling:
        run.resync()
    found = run.versions.version
    other = Engines()
    other.theta = run.engines.theta
    run.versions.new_epoch(other, run.steps)
    assert run.versions.state is State.UNPUBLISHED
    run.versions.start()
    assert other.calls == [("publish", found + 1, 1, 1), ("refresh", 1)]
    assert run.versions.state is State.SETTLED


def test_illegal_moves_raise_and_change_nothing() -> None:
    run = Run()
    for move in (
        run.step,
        run.resync,
        lambda: run.versions.close_batch([]),
        lambda: run.versions.new_epoch(run.engines, 0),
    ):
        with pytest.raises(VersionsError, match="is not allowed in state UNPUBLISHED, only in"):
            move()
    run.versions.start()
    with pytest.raises(VersionsError, match="start is not allowed in state SETTLED, only in UNPUBLISHED"):
        run.versions.start()
    run.step()
    run.resync()
    run.engines.calls.clear()
    with pytest.raises(VersionsError, match="version 1: close_batch is not allowed in state STRADDLING"):
        run.versions.close_batch(batch(1))
    assert run.engines.calls == []
    assert (run.versions.state, run.versions.version) == (State.STRADDLING, 1)


def test_a_batch_of_another_version_is_rejected() -> None:
    run = Run(version=4)
    run.versions.start()
    with pytest.raises(VersionsError, match=r"drawn under versions \[3\], expected 4"):
        run.versions.open_batch(0, batch(3))


def test_when_kl_is_due() -> None:
    checks = ChecksConfig(self_prefix_every=4)
    assert kl_is_due(0, None, checks)
    assert not kl_is_due(5, 2, checks)
    assert kl_is_due(6, 2, checks)
    assert not kl_is_due(6, None, ChecksConfig(self_prefix_responses=0))


def test_times_and_bytes_go_into_the_next_report() -> None:
    run = Run()
    run.versions.start()
    step = {"time/score_s": 1.0, "time/train_s": 1.0, "tokens": 10.0}
    first, second = run.times.report(step), run.times.report(step)
    assert (first["weights/wire_bytes"], second["weights/wire_bytes"]) == (8, 0)
    assert first["time/publish_s"] > 0 == second["time/publish_s"]
    assert first["trainer/tokens_per_s"] == 5
