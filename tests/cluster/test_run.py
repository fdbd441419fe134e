"""A run in real pods, from install to uninstall. The tests build on each other, in this order."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from .conftest import RUN, Json, Release, command, merge, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
STEPS_LATER = 400
WAIT = ("--wait", "--timeout", "20m")


def note(name: str, value: float) -> None:
    print(f"measured: {name} {value:.0f} s")


def reports(release: Release) -> list[Json]:
    """Headers of the trainer's reports, oldest first."""
    raw = release.redis("--json", "xrange", release.key("reports"), "-", "+")
    return [json.loads(dict(zip(f[::2], f[1::2], strict=True))["h"]) for _, f in json.loads(raw)]


def ready_samplers(release: Release) -> int:
    return sum(pod["ready"] for pod in release.status()["pods"] if pod["component"] == "sampler")


def goes_on(release: Release, budget_s: float = 600) -> None:
    """Steps are trained from now on: three more."""
    begin = until("a status", release.step, budget_s)
    until("three more steps", lambda: release.step() >= begin + 3, budget_s)


def test_install_and_wait(release: Release, folder: Path) -> None:
    began = time.monotonic()
    values = release.write_values(folder)
    out = release.helm("install", str(release.chart), "-f", str(values), *WAIT, timeout=1300)
    assert "leeway status" in out
    note("helm install --wait", time.monotonic() - began)
    until("the first step", lambda: release.step() >= 1, 600)
    note("helm install to first optimiser step", time.monotonic() - began)


def test_it_trains_to_its_end_with_a_resync(release: Release) -> None:
    until("the end of the run", lambda: release.status()["run"].get("finished"), 900)
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
    release.values = merge(release.values, {"run": {"trainer": {"steps": STEPS_LATER}}})
    values = release.write_values(folder)
    release.helm("upgrade", str(release.chart), "-f", str(values), *WAIT, timeout=1300)
    until("steps after the upgrade", lambda: release.step() > RUN["trainer"]["steps"], 600)
    assert min(r["step"] for r in reports(release) if r["epoch"] == 1 and r["event"] == "step") == 8


def test_scale_1_3_1_loses_no_ticket(release: Release) -> None:
    began = time.monotonic()
    assert "3 replicas" in release.leeway("scale", "samplers", "3")
    until("three ready samplers", lambda: ready_samplers(release) == 3, 900)
    note("scale-up to three ready samplers", time.monotonic() - began)
    until("tickets for each", lambda: all(s["tickets"] for s in release.status()["run"]["samplers"]), 600)
    goes_on(release)
    release.kubectl("scale", "deployment", f"{release.name}-leeway-sampler", "--replicas=1")
    until("one sampler", lambda: len(release.pods("sampler")) == 1, 300)
    goes_on(release)
    steps = [r["step"] for r in reports(release) if r["epoch"] == 1 and r["event"] == "step"]
    assert steps == list(range(8, 8 + len(steps))), "each batch was trained once, in order"


@pytest.mark.parametrize("part", ["sampler", "controller", "redis", "trainer"])
def test_a_deleted_pod_costs_no_run(release: Release, part: str) -> None:
    goes_on(release)
    for pod in release.pods(part):
        release.kubectl("delete", "pod", pod["metadata"]["name"])
    goes_on(release, 900)


def test_a_drained_node_under_its_budget(release: Release, on_testbed: bool) -> None:
    release.leeway("scale", "samplers", "2")
    until("two ready samplers", lambda: ready_samplers(release) == 2, 900)
    node = release.pods("sampler")[0]["spec"]["nodeName"]
    if on_testbed:
        text = command("helm", "template", release.name, str(release.chart), "--namespace", release.namespace)
        docs = [d for d in yaml.safe_load_all(text) if d and d["kind"] == "PodDisruptionBudget"]
        older = [{**d, "apiVersion": "policy/v1beta1"} for d in docs]
        file = release.chart.parent / "budgets.yaml"
        file.write_text(yaml.safe_dump_all(older))
        release.kubectl("apply", "-f", str(file))
    try:
        flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=600s")
        command("kubectl", "drain", node, *flags, timeout=660)
        assert not [p for p in release.pods("sampler") if p["spec"]["nodeName"] == node]
        goes_on(release, 900)
    finally:
        command("kubectl", "uncordon", node)


def test_rollback(release: Release) -> None:
    release.helm("rollback", "1", *WAIT, timeout=1300)
    # The first revision's run has been finished for long: its trainer publishes and waits.
    until("the end again", lambda: release.status()["run"].get("finished"), 600)


def test_uninstall_leaves_what_the_keep_policy_says(release: Release) -> None:
    release.helm("uninstall", "--wait", "--timeout", "5m")
    kinds = "deployments,statefulsets,services,configmaps,secrets,pvc,roles,rolebindings,leases,pods"
    left = json.loads(release.kubectl("get", kinds, "-o", "json"))["items"]
    system = ("kube-root-ca.crt", "default-token")
    names = {
        f"{x['kind']}/{x['metadata']['name']}" for x in left if not x["metadata"]["name"].startswith(system)
    }
    # The Lease is made by the controller, the test's pod by helm test; Helm knows neither.
    made = {f"Lease/{release.name}-leeway-controller", f"Pod/{release.name}-leeway-test"}
    claims = {f"PersistentVolumeClaim/{release.name}-leeway-{part}" for part in ("trainer", "models")}
    assert names - made == claims
