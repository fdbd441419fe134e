"""A run in real pods, from install to uninstall. The tests build on each other, in this order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
import yaml

from .conftest import RUN, Json, Release, command, merge, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
STEPS_LATER = 5000
WAIT = ("--wait", "--timeout", "20m")
Record = Callable[[str, object], None]


def reports(release: Release) -> list[Json]:
    """Headers of the trainer's reports with `at`, the server's clock in seconds; oldest first."""
    raw = release.redis("--json", "xrange", release.key("reports"), "-", "+")
    headers = []
    for entry, fields in json.loads(raw):
        header = json.loads(dict(zip(fields[::2], fields[1::2], strict=True))["h"])
        headers.append({**header, "at": int(entry.split("-")[0]) / 1000})
    return headers


def samplers(release: Release) -> list[Json]:
    """What each sampler says of itself."""
    names = json.loads(release.redis("--json", "smembers", release.key("samplers")))
    keys = [release.key(f"samplers:{name}") for name in names]
    raw = json.loads(release.redis("--json", "mget", *keys)) if keys else []
    return [json.loads(value) for value in raw if value]


def assert_each_batch_once_and_in_order(release: Release) -> None:
    """No batch was lost: within a run epoch steps follow each other, and an epoch continues from a checkpoint
    of the one before. A report that is written again, because the answer was lost with the server, is one.
    """
    every, done = RUN["trainer"]["checkpoint_every"], 0
    written = ((r["epoch"], r["step"]) for r in reports(release) if r["event"] == "step")
    trained = [at for at, _ in groupby(written)]
    for epoch, of_epoch in groupby(trained, key=lambda at: at[0]):
        steps = [step for _, step in of_epoch]
        assert steps == list(range(steps[0], steps[0] + len(steps))), f"run epoch {epoch}"
        assert done - every <= steps[0] <= done, f"run epoch {epoch} after {done}"
        done = steps[-1] + 1


def goes_on(release: Release, budget_s: float = 600) -> None:
    """Steps are trained from now on: three more."""
    begin = until("a status", release.step, budget_s)
    until("three more steps", lambda: release.step() >= begin + 3, budget_s)


def test_install_and_wait(release: Release, folder: Path, record_property: Record) -> None:
    began = time.time()
    values = release.write_values(folder)
    out = release.helm("install", str(release.chart), "-f", str(values), *WAIT, timeout=1300)
    assert "leeway status" in out
    record_property("helm install --wait, s", round(time.time() - began))
    until("the first step", lambda: release.step() >= 1, 600)
    first = next(r for r in reports(release) if r["event"] == "step")
    record_property("helm install to first optimiser step, s", round(first["at"] - began))


def test_it_trains_to_its_end_with_a_resync(release: Release) -> None:
    until("the end of the run", lambda: release.state().get("finished"), 900)
    run = release.status()["run"]
    assert run["step"] == RUN["trainer"]["steps"] and run["current"] >= 2, "two resyncs at max_age 3"
    out = release.kubectl(
        "exec", f"{release.name}-leeway-trainer-0", "--", "ls", "/out/model", "/out/checkpoints"
    )
    assert "config.json" in out and "latest" in out


def test_helm_test(release: Release) -> None:
    assert "Succeeded" in release.helm("test", "--timeout", "5m")


def test_one_controller_leads(release: Release) -> None:
    holder = release.kubectl(
        "get", "lease", f"{release.name}-leeway-controller", "-o", "jsonpath={.spec.holderIdentity}"
    )
    assert holder in {pod["metadata"]["name"] for pod in release.pods("controller")}


def test_upgrade_with_a_changed_run(release: Release, folder: Path) -> None:
    changed = {"trainer": {"steps": STEPS_LATER}, "sync": {"max_age": 8}}
    release.values = merge(release.values, {"run": changed})
    values = release.write_values(folder)
    release.helm("upgrade", str(release.chart), "-f", str(values), *WAIT, timeout=1300)
    until("steps after the upgrade", lambda: release.step() > RUN["trainer"]["steps"], 600)
    steps = [(r["epoch"], r["step"]) for r in reports(release) if r["event"] == "step"]
    before = RUN["trainer"]["steps"]
    assert next(epoch for epoch, step in steps if step == before - 1) + 1 == max(steps)[0]
    assert min(step for epoch, step in steps if epoch == max(steps)[0]) == before, "went on, once restarted"


def test_scale_1_3_1_loses_no_ticket(release: Release, record_property: Record) -> None:
    began = time.monotonic()
    assert "3 replicas" in release.leeway("scale", "samplers", "3")
    for count in (2, 3):
        until(f"{count} ready samplers", lambda count=count: release.ready("sampler") >= count, 900)
        record_property(f"scale from 1 to 3, until {count} are ready, s", round(time.monotonic() - began))
    until("tickets for each", lambda: all(s["tickets"] for s in samplers(release)), 600)
    goes_on(release)
    release.kubectl("scale", "deployment", f"{release.name}-leeway-sampler", "--replicas=1")
    until("one sampler", lambda: len(release.pods("sampler")) == 1, 300)
    goes_on(release)
    assert_each_batch_once_and_in_order(release)


@pytest.mark.parametrize("part", ["sampler", "controller", "redis", "trainer"])
def test_a_deleted_pod_costs_no_run(release: Release, part: str) -> None:
    goes_on(release)
    for pod in release.pods(part):
        release.kubectl("delete", "pod", pod["metadata"]["name"])
    goes_on(release, 900)
    assert_each_batch_once_and_in_order(release)


def other_nodes(node: str) -> list[str]:
    found = command("kubectl", "get", "nodes", "-o", "name").split()
    return [name for name in found if name != f"node/{node}"]


def make_older_budgets(release: Release) -> None:
    """The chart's PodDisruptionBudgets in the form that the test bed's Kubernetes knows."""
    text = command("helm", "template", release.name, str(release.chart), "--namespace", release.namespace)
    docs = [d for d in yaml.safe_load_all(text) if d and d["kind"] == "PodDisruptionBudget"]
    file = release.chart.parent / "budgets.yaml"
    file.write_text(yaml.safe_dump_all([{**d, "apiVersion": "policy/v1beta1"} for d in docs]))
    release.kubectl("apply", "-f", str(file))


def test_a_drained_node_under_its_budget(release: Release, on_testbed: bool) -> None:
    node = release.pods("sampler")[0]["spec"]["nodeName"]
    if on_testbed:
        make_older_budgets(release)
        command("kubectl", "cordon", *other_nodes(node))  # so that both samplers are on one node
    release.leeway("scale", "samplers", "2")
    until("two ready samplers", lambda: release.ready("sampler") == 2, 900)
    if on_testbed:
        command("kubectl", "uncordon", *other_nodes(node))
    try:
        flags = "--ignore-daemonsets --delete-emptydir-data --timeout=900s"
        said = command("sh", "-c", f"kubectl drain {node} {flags} 2>&1", timeout=960)
        assert not on_testbed or "violate the pod's disruption budget" in said, said
        assert not [p for p in release.pods("sampler") if p["spec"].get("nodeName") == node]
        goes_on(release, 900)
        assert_each_batch_once_and_in_order(release)
    finally:
        command("kubectl", "uncordon", node)


def test_rollback(release: Release) -> None:
    release.helm("rollback", "1", *WAIT, timeout=1300)
    # The first revision's run has been finished for long: its trainer publishes and waits.
    until("the end again", lambda: release.state().get("finished"), 600)


def left_of(release: Release) -> set[str]:
    """Kind/name of the objects of the release; its namespace may hold others."""
    kinds = "deployments,statefulsets,services,configmaps,secrets,pvc,roles,rolebindings,leases,pods"
    left = json.loads(release.kubectl("get", kinds, "-o", "json"))["items"]
    names = (f"{x['kind']}/{x['metadata']['name']}" for x in left)
    return {name for name in names if name.split("/")[1].startswith(f"{release.name}-")}


def test_uninstall_leaves_what_the_keep_policy_says(release: Release) -> None:
    release.helm("uninstall", "--wait", "--timeout", "5m")
    # Helm waits for its own objects; their pods may still drain.
    until("no pod of the release", lambda: not any("Pod/" in name for name in left_of(release)), 180)
    claims = {f"PersistentVolumeClaim/{release.name}-leeway-{part}" for part in ("trainer", "models")}
    assert left_of(release) == claims
