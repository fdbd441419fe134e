"""Pods in a few words, and when a sampler's process is no longer the one it was."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes.client import ApiClient, V1Pod

from leeway.kube import NODE_NOT_READY, PodView, find_loss, view_pod


def pod(**status: Any) -> V1Pod:
    """A pod as the API server sends it."""
    metadata = {"name": "s-0", "labels": {"app.kubernetes.io/component": "sampler"}}
    if status.pop("deleted", False):
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"  # type: ignore[assignment]
    return ApiClient()._ApiClient__deserialize({"metadata": metadata, "status": status}, "V1Pod")


def condition(name: str, status: str, **more: str) -> dict[str, str]:
    return {"type": name, "status": status, **more}


def container(state: dict[str, Any], restarts: int = 0, ready: bool = False, **last: Any) -> dict[str, Any]:
    return {
        "name": "sampler",
        "image": "i",
        "imageID": "i",
        "ready": ready,
        "restartCount": restarts,
        "state": state,
        "lastState": last,
    }


RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
KILLED = {"exitCode": 137, "reason": "OOMKilled"}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no GPU": (
        {
            "phase": "Pending",
            "conditions": [
                condition(
                    "PodScheduled", "False", reason="Unschedulable", message="2 Insufficient nvidia.com/gpu."
                )
            ],
        },
        "Unschedulable: 2 Insufficient nvidia.com/gpu.",
    ),
    "no image": (
        {
            "phase": "Pending",
            "containerStatuses": [container({"waiting": {"reason": "ErrImagePull", "message": "no"}})],
        },
        "sampler: ErrImagePull: no",
    ),
    "starting": (
        {"phase": "Pending", "containerStatuses": [container({"waiting": {"reason": "PodInitializing"}})]},
        "",
    ),
    "crash loop after running out of memory": (
        {
            "phase": "Running",
            "containerStatuses": [
                container({"waiting": {"reason": "CrashLoopBackOff"}}, restarts=3, terminated=KILLED)
            ],
        },
        "sampler: CrashLoopBackOff; previous run: OOMKilled: exit code 137",
    ),
    "restarted": (
        {"phase": "Running", "containerStatuses": [container(RUNNING, restarts=1, terminated=KILLED)]},
        "sampler restarted; previous run: OOMKilled: exit code 137",
    ),
    "evicted": (
        {"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
        "Evicted: low on memory",
    ),
    "lost node": (
        {
            "phase": "Running",
            "conditions": [condition("Ready", "False"), condition("ContainersReady", "True")],
        },
        "its node is not ready",
    ),
    "going": ({"phase": "Running", "deleted": True}, "Terminating"),
    "well": (
        {
            "phase": "Running",
            "conditions": [condition("Ready", "True")],
            "containerStatuses": [container(RUNNING, restarts=1, ready=True, terminated=KILLED)],
        },
        "",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_reason(case: str) -> None:
    status, reason = CASES[case]
    view = view_pod(pod(**status))
    assert (view.name, view.component, view.reason) == ("s-0", "sampler", reason)
    assert view.ready is (case == "well")


def view(**change: Any) -> PodView:
    facts = {
        "name": "s-0",
        "component": "sampler",
        "phase": "Running",
        "ready": True,
        "restarts": 0,
        "reason": "",
    }
    return PodView(**{**facts, **change})


def test_loss() -> None:
    assert find_loss(view(), view(), gone=False) is None
    assert find_loss(None, view(restarts=2), gone=False) is None, "the first look says nothing"
    assert find_loss(view(), view(ready=False), gone=False) is None, "a resync makes it not ready for a while"
    away = view(ready=False, reason=NODE_NOT_READY)
    assert find_loss(view(), away, gone=False) == NODE_NOT_READY
    assert find_loss(away, away, gone=False) is None, "said once"
    assert find_loss(view(), view(), gone=True) == "its pod was deleted"
    assert "Evicted" in (find_loss(view(), view(phase="Failed", reason="Evicted"), gone=False) or "")
    assert "OOMKilled" in (find_loss(view(), view(restarts=1, reason="OOMKilled"), gone=False) or "")
