"""PodWatch: events of pods become losses, each once."""

from __future__ import annotations

from typing import Any, cast

from leeway.kube import Cluster, PodView
from leeway_controller.pods import PodWatch


def view(name: str = "s", restarts: int = 0, phase: str = "Running") -> PodView:
    return PodView(name, "sampler", phase, ready=True, restarts=restarts, reason="")


def test_losses_by_pod() -> None:
    lost: list[tuple[str, str]] = []
    watch = PodWatch(cast(Cluster, cast(Any, None)), lambda name, why: lost.append((name, why)))
    for seen, gone in [
        (view(), False),
        (view("other"), False),
        (view(), False),
        (view(restarts=1), False),  # lost
        (view(restarts=1), False),
        (view(restarts=1), True),  # lost
        (view("other"), False),
    ]:
        watch.see(seen, gone)
    assert [name for name, _ in lost] == ["s", "s"]
    assert "container ended" in lost[0][1] and "deleted" in lost[1][1]
