"""Rendering the chart with both Helm versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "leeway"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
TOOLS = Path(sys.prefix) / "chart-tools"
Doc = dict[str, Any]


def find_tool(name: str) -> str:
    """The command `name` from PATH or from where `make test` puts it; skips the test when there is none."""
    found = shutil.which(name) or shutil.which(str(TOOLS / name))
    if found is None:
        pytest.skip(f"{name} is neither in PATH nor in {TOOLS}: run scripts/chart_tools.py {TOOLS}")
    return found


def helm(binary: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a helm command."""
    return subprocess.run([find_tool(binary), *args], capture_output=True, text=True, timeout=60, check=False)


def as_arguments(sets: dict[str, Any]) -> list[str]:
    """`--set-json key=value` for each."""
    import json

    return [part for key, value in sets.items() for part in ("--set-json", f"{key}={json.dumps(value)}")]


@cache
def _template(binary: str, args: tuple[str, ...]) -> str:
    done = helm(binary, "template", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(
    *files: Path,
    binary: str = "helm",
    name: str = "demo",
    namespace: str = "default",
    **sets: Any,
) -> list[Doc]:
    """The manifests; `sets` are values with `__` for dots."""
    values = [part for file in files for part in ("-f", str(file))]
    given = as_arguments({key.replace("__", "."): value for key, value in sets.items()})
    text = _template(binary, (name, str(CHART), "--namespace", namespace, *values, *given))
    return [doc for doc in yaml.safe_load_all(text) if doc]


def refusal(binary: str, *files: Path, **sets: Any) -> str:
    """What helm says about values that it refuses."""
    values = [part for file in files for part in ("-f", str(file))]
    given = as_arguments({key.replace("__", "."): value for key, value in sets.items()})
    done = helm(binary, "template", "demo", str(CHART), *values, *given)
    assert done.returncode != 0, "these values were accepted"
    return done.stderr


def pick(docs: list[Doc], kind: str, ending: str = "") -> Doc:
    """The one manifest of `kind` whose name ends with `ending`."""
    found = [d for d in docs if d["kind"] == kind and d["metadata"]["name"].endswith(ending)]
    assert len(found) == 1, f"{kind} *{ending}: {[d['metadata']['name'] for d in found]}"
    return found[0]


def pod_of(doc: Doc) -> Doc:
    """The pod's spec of a workload or a pod."""
    return doc["spec"]["template"]["spec"] if "template" in doc["spec"] else doc["spec"]


def workloads(docs: list[Doc]) -> dict[str, Doc]:
    """Deployments, StatefulSets and Pods by component."""
    kinds = ("Deployment", "StatefulSet", "Pod")
    return {d["metadata"]["labels"]["app.kubernetes.io/component"]: d for d in docs if d["kind"] in kinds}
