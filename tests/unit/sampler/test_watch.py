"""The watcher of weight versions: fences, and versions of another configuration."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from leeway.weights import WeightsError
from leeway_sampler import watch
from leeway_sampler.watch import WeightWatcher


class Tail:
    """Gives out manifests as the test adds them."""

    def __init__(self):
        self.manifests = []

    def read(self, count, wait_s):
        found, self.manifests = self.manifests, []
        return [SimpleNamespace(fields=manifest) for manifest in found]


class Weights:
    """Notes what is applied; `during` is called in the middle of it."""

    def __init__(self):
        self.applied, self.forgotten, self.during = [], 0, lambda: None

    async def apply(self, manifest, **_):
        self.during()
        await asyncio.sleep(0.01)
        self.applied.append(manifest.version)

    def forget(self):
        self.forgotten += 1


def manifest(version, config="mine", epoch=0):
    return SimpleNamespace(
        version=version, epoch=epoch, key=(epoch, version), config=config, traceparent=None
    )


@pytest.fixture
async def rig(monkeypatch):
    monkeypatch.setattr(watch, "parse_manifest", lambda fields: fields)
    monkeypatch.setattr(watch, "RETRY_S", 0.01)
    tail, weights, foreign = Tail(), Weights(), []

    async def on_change(error):
        pass

    async def on_foreign(manifest):
        foreign.append(manifest.config)

    watcher = WeightWatcher(tail, weights, 1.0, on_change, "mine", on_foreign)  # type: ignore[arg-type]
    running = asyncio.create_task(watcher.run())

    async def until(condition):
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.01)
        pytest.fail("not within 10 s")

    yield SimpleNamespace(tail=tail, weights=weights, watcher=watcher, foreign=foreign, until=until)
    running.cancel()
    with pytest.raises((asyncio.CancelledError, WeightsError)):
        await running


async def test_a_sampler_that_is_late_need_not_begin_again(rig):
    rig.weights.during = lambda: rig.watcher.set_fence("0.1.77")  # while the version arrives
    rig.tail.manifests.append(manifest(1))
    await rig.until(rig.watcher.ready.is_set)
    assert rig.watcher.passed == "0.1.77"
    assert (rig.weights.applied, rig.weights.forgotten) == ([1], 0)


async def test_a_full_fence_is_passed_only_by_a_load_that_began_after_it(rig):
    rig.weights.during = lambda: rig.watcher.set_fence("0.1.77.full")
    rig.tail.manifests.append(manifest(1))
    await rig.until(rig.watcher.ready.is_set)
    assert rig.watcher.passed == "0.1.77.full"
    assert (rig.weights.applied, rig.weights.forgotten) == ([1, 1], 1)


async def test_versions_of_another_configuration_are_not_loaded(rig):
    rig.tail.manifests.append(manifest(1))
    await rig.until(rig.watcher.ready.is_set)
    rig.tail.manifests.append(manifest(2, "other", epoch=1))
    await rig.until(lambda: rig.foreign)
    assert not rig.watcher.ready.is_set()
    rig.tail.manifests.append(manifest(3, "other", epoch=1))
    await rig.until(lambda: rig.watcher.wanted == (1, 3))
    rig.watcher.set_fence("1.3.5")
    await asyncio.sleep(0.1)
    assert (rig.weights.applied, rig.foreign) == ([1], ["other"]), "told once, and never loaded"
    assert not rig.watcher.ready.is_set()
    rig.tail.manifests.append(manifest(4, epoch=2))
    await rig.until(rig.watcher.ready.is_set)
    assert (rig.weights.applied, rig.watcher.foreign) == ([1, 4], "")
