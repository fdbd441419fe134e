"""A cluster, and the chart installed in it.

Which cluster: the one of KUBECONFIG if that is set, which must be able to run the images that
LEEWAY_TEST_VALUES (a values file) names; else the test bed next to this checkout, into which the images
leeway-{sampler,trainer,controller}:dev are loaded (`make images`), unless it is up already and
LEEWAY_TEST_IMAGES=loaded says that it has them. A cluster that was up before stays up.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TESTBED = Path(os.environ.get("TESTBED", ROOT.parent / "shared" / "testbed" / "testbed"))
IMAGES = [f"leeway-{name}:dev" for name in ("sampler", "trainer", "controller")]
Json = dict[str, Any]
RUN: Json = {
    "name": "tiny",
    "model": {"name": "tiny", "max_length": 64, "params": {"target_accuracy": 0.2}},
    "task": {"kind": "digits", "params": {"length": 6}, "reward": "exact", "size": 4096},
    "sampling": {"max_new_tokens": 10, "head_tokens": 16},
    "batch": {"prompts": 16, "group_size": 4},
    "sync": {"clip_fraction": None, "max_age": 3, "ticket_idle_s": 30.0},
    "sampler": {"max_num_seqs": 64, "cpu_threads": 1, "drain_s": 20.0},
    "trainer": {"steps": 8, "learning_rate": 2e-4, "checkpoint_every": 4, "cpu_threads": 1},
    "telemetry": {"log_level": "INFO"},
}


def command(*args: str, timeout: float = 600, check: bool = True) -> str:
    """Standard output of a command; a failure shows both outputs."""
    done = subprocess.run(args, capture_output=True, text=True, timeout=timeout, check=False)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(args)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def until(what: str, check: Callable[[], Any], budget_s: float) -> Any:
    """Poll `check` until it gives something true."""
    deadline = time.monotonic() + budget_s
    while not (found := check()):
        assert time.monotonic() < deadline, f"not within {budget_s:g} s: {what}"
        time.sleep(2.0)
    return found


@dataclass
class Release:
    """One release of the chart, driven by the same commands as a user's."""

    chart: Path
    namespace: str
    name: str = "demo"
    values: Json = field(default_factory=dict)
    binary: str = "helm"

    def kubectl(self, *args: str, **options: Any) -> str:
        return command("kubectl", "-n", self.namespace, *args, **options)

    def helm(self, verb: str, *args: str, **options: Any) -> str:
        return command(self.binary, verb, self.name, *args, "--namespace", self.namespace, **options)

    def write_values(self, folder: Path, **changes: Any) -> Path:
        values = {**self.values, **changes}
        path = folder / f"values-{len(list(folder.iterdir()))}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def pods(self, component: str) -> list[Json]:
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        return json.loads(self.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]

    def leeway(self, *args: str, **options: Any) -> str:
        return self.kubectl("exec", f"deploy/{self.name}-leeway-controller", "--", "leeway", *args, **options)

    def status(self) -> Json:
        text = self.leeway("status", "--json", check=False)
        return json.loads(text) if text.startswith("{") else {"run": {}, "pods": []}

    def state(self) -> Json:
        """The controller's state in Redis, without a Python process for each look; {} while there is none."""
        text = self.redis("hget", self.key("state"), "controller", check=False)
        return json.loads(text) if text.startswith("{") else {}

    def step(self) -> int:
        return self.state().get("next_step", 0)

    def ready(self, component: str) -> int:
        """Number of its pods that are ready."""
        found = [c for pod in self.pods(component) for c in pod["status"].get("conditions", ())]
        return sum(c["type"] == "Ready" and c["status"] == "True" for c in found)

    def redis(self, *args: str, **options: Any) -> str:
        line = " ".join(f"'{arg}'" for arg in args)
        pod = f"{self.name}-leeway-redis-0"
        shell = f'REDISCLI_AUTH="$REDIS_PASSWORD" redis-cli {line}'
        return self.kubectl("exec", pod, "--", "sh", "-c", shell, **options).strip()

    def key(self, name: str) -> str:
        return f"leeway:{{{self.namespace}.{self.name}}}:{name}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the tests measured, for docs/benchmarks.md."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties if report.when == "call" else ():
            terminalreporter.write_line(f"measured: {name}: {value}")


def run_testbed(*args: str) -> str:
    """A command of the test bed."""
    return command("bash", str(TESTBED), *args, timeout=1800)


@pytest.fixture(scope="session")
def on_testbed() -> bool:
    """True when the cluster is the test bed's."""
    return "KUBECONFIG" not in os.environ


@pytest.fixture(scope="session")
def cluster(on_testbed: bool) -> Iterator[Json]:
    """A cluster that can run the images; gives values for it."""
    file = os.environ.get("LEEWAY_TEST_VALUES")
    given: Json = yaml.safe_load(Path(file).read_text()) if file else {}
    if not on_testbed:
        yield given
        return
    if not TESTBED.exists():
        pytest.skip(f"KUBECONFIG is not set and there is no test bed at {TESTBED}")
    before = dict(os.environ)
    was_up = subprocess.run(["bash", str(TESTBED), "cluster", "status"], capture_output=True).returncode == 0
    os.environ["KUBECONFIG"] = run_testbed("cluster", "up", "--nodes", "2").strip()
    tools = Path(os.environ.get("TESTBED_HOME", "/var/cache/leeway-testbed")) / "bin"
    os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    if not (was_up and os.environ.get("LEEWAY_TEST_IMAGES") == "loaded"):
        run_testbed("image", "base")
        run_testbed("image", "load", *IMAGES, "redis:7-bookworm")
    local: Json = {part: {"image": {"tag": "dev"}} for part in ("sampler", "trainer", "controller")}
    yield merge({**local, "redis": {"image": {"tag": "7-bookworm"}}}, given)
    if not was_up:
        run_testbed("cluster", "down")
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory, on_testbed: bool) -> Path:
    """The chart; for the test bed a copy that accepts its old Kubernetes."""
    copy = tmp_path_factory.mktemp("chart") / "leeway"
    shutil.copytree(ROOT / "charts" / "leeway", copy)
    if on_testbed:
        file = copy / "Chart.yaml"
        file.write_text("\n".join(x for x in file.read_text().splitlines() if "kubeVersion" not in x))
    return copy


def merge(base: Json, change: Json) -> Json:
    """`base` with `change` put over it, level by level."""
    both = {k: merge(base[k], v) if isinstance(v, dict) and k in base else v for k, v in change.items()}
    return {**base, **both}


@pytest.fixture(scope="session")
def release(cluster: Json, chart: Path, on_testbed: bool) -> Iterator[Release]:
    """A namespace and values; what is installed in it is removed at the end."""
    budget = {"podDisruptionBudget": {"enabled": not on_testbed}}  # policy/v1 is newer than the test bed
    cpu = {"resources": {"requests": {"cpu": "500m"}}}  # or they get what the other pods leave
    values: Json = {
        "run": RUN,
        "sampler": {"replicas": 1, "gpus": 0, "shmSize": "256Mi", **cpu, **budget},
        "trainer": {"gpus": 0, "shmSize": "256Mi", "persistence": {"size": "1Gi"}, **cpu, **budget},
        "controller": {"replicas": 2, **budget},
        "redis": {"maxmemoryMiB": 256, "persistence": {"size": "1Gi"}},
        "modelCache": {"enabled": True, "size": "1Gi"},
    }
    namespace = f"leeway-test-{os.getpid()}"
    command("kubectl", "create", "namespace", namespace)
    made = Release(chart, namespace, values=merge(values, cluster))
    yield made
    command("kubectl", "delete", "namespace", namespace, "--wait=false", check=False)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For values files."""
    return tmp_path_factory.mktemp("values")
