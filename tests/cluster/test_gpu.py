"""GPU pods are scheduled where there are GPUs; where there are none, `leeway status` says why they wait."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Json, Release, merge, run_testbed, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def phases(release: Release) -> dict[str, str]:
    return {
        part: pod["status"]["phase"] + ("" if pod["spec"].get("nodeName") else ", not scheduled")
        for part in ("sampler", "trainer")
        for pod in release.pods(part)
    }


def test_gpu_pods(release: Release, folder: Path, cluster: Json, on_testbed: bool) -> None:
    if not on_testbed:
        pytest.skip("needs a cluster whose nodes have no GPUs and can be given some")
    # Also the other Helm, where there is one.
    binary = "helm3" if shutil.which("helm3") else "helm"
    gpu = Release(release.chart, release.namespace, name="gpu", values=release.values, binary=binary)
    gpu.values = merge(gpu.values, {"sampler": {"gpus": 1}, "trainer": {"gpus": 2}})
    run_testbed("gpu", "0")
    gpu.helm("install", str(gpu.chart), "-f", str(gpu.write_values(folder)), timeout=120)
    try:
        until("both parts", lambda: len(phases(gpu)) == 2, 60)
        until("a verdict of the scheduler", lambda: "Insufficient nvidia.com/gpu" in status_of(gpu), 60)
        assert set(phases(gpu).values()) == {"Pending, not scheduled"}
        said = status_of(gpu)
        for part in ("sampler", "trainer"):
            line = next(x for x in said.splitlines() if f"gpu-leeway-{part}" in x)
            assert "Unschedulable" in line and "Insufficient nvidia.com/gpu" in line
        run_testbed("gpu", "2")
        until("room for both", lambda: "not scheduled" not in str(phases(gpu)), 120)
    finally:
        gpu.helm("uninstall")
        run_testbed("gpu", "0")


def status_of(release: Release) -> str:
    """`leeway status` on this machine, by the kubeconfig alone."""
    prefix = f"{release.name}-leeway"
    command = [sys.executable, "-m", "leeway_host", "status", "--release", prefix, "-n", release.namespace]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout


def test_as_json(release: Release) -> None:
    command = [sys.executable, "-m", "leeway_host", "status", "--release", "none", "-n", release.namespace]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"run": None, "pods": []}
