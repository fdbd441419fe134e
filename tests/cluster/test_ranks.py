"""Two trainer pods make one group (ZeRO-3 over gloo); one that is lost takes it back to its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Release, merge, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def test_two_trainer_pods(release: Release, folder: Path) -> None:
    pair = Release(release.chart, release.namespace, name="pair", values=release.values)
    run = {"trainer": {"steps": 30, "zero_stage": 3, "checkpoint_every": 2}}
    trainer = {"replicas": 2, "persistence": {"accessModes": ["ReadWriteMany"], "keep": False}}
    cache = {"existingClaim": f"{release.name}-leeway-models"} if release.pods("redis") else {}
    change = {
        "run": run,
        "trainer": trainer,
        "modelCache": {"keep": False, **cache},
        "controller": {"replicas": 1},
    }
    pair.values = merge(pair.values, change)
    pair.helm("install", str(pair.chart), "-f", str(pair.write_values(folder)), timeout=120)
    try:
        until("four steps of two ranks", lambda: pair.step() >= 4, 1200)
        assert len(pair.pods("trainer")) == 2
        pair.kubectl("delete", "pod", "pair-leeway-trainer-1")
        until("a run epoch after the loss", lambda: pair.state().get("epoch", 0) >= 2, 600)
        until("steps after the loss", lambda: pair.step() >= 7, 600)
    finally:
        pair.helm("uninstall", "--wait")
