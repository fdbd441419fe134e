"""A key that is null or missing means its default: for every key of the values."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from .chart_support import CHART, ROOT, helm

sys.path.append(str(ROOT / "charts" / "schema"))
from values import ChartValues

GO_ERRORS = re.compile(
    r"nil pointer|reflect|wrong type for value|can't evaluate field|interface conversion|runtime error|panic"
)
RUN = {"task": {"kind": "digits"}}


def levels(value: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """(path, default of each key that is not a level) of every level of the values."""
    leaves: dict[str, Any] = {}
    for name, field in type(value).model_fields.items():
        inner, key = getattr(value, name), field.alias or name
        if isinstance(inner, BaseModel):
            yield from levels(inner, (*path, key))
        else:
            leaves[key] = inner
    yield path, leaves


LEVELS = dict(levels(ChartValues()))


def template(binary: str, chart: Path, *args: str) -> str:
    done = helm(binary, "template", "demo", str(chart), *args)
    assert not GO_ERRORS.search(done.stderr), done.stderr
    assert done.returncode == 0, done.stderr
    # The passwords are generated anew each time.
    return re.sub(r"-password: \S+=", "-password: x", done.stdout)


@cache
def plain(binary: str) -> str:
    return template(binary, CHART)


def merged(paths: Iterable[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """One tree with a value at each path."""
    tree: dict[str, Any] = {}
    for path, value in paths:
        level = tree
        for key in path[:-1]:
            level = level.setdefault(key, {})
        level[path[-1]] = value
    return tree


@pytest.mark.parametrize("depth", sorted({len(path) for path in LEVELS} - {0}))
def test_levels_that_are_null(depth: int, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(merged((path, None) for path in LEVELS if len(path) == depth)))
    assert template("helm", CHART, "-f", str(file)) == plain("helm")


@pytest.mark.parametrize("top", sorted({path[0] for path in LEVELS if path}))
def test_keys_that_are_null(top: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    keys = [(*path, key) for path, leaves in LEVELS.items() if path[:1] == (top,) for key in leaves]
    file.write_text(yaml.safe_dump(merged((key, None) for key in keys)))
    assert template("helm", CHART, "-f", str(file)) == plain("helm")


@pytest.mark.parametrize("binary", ["helm", "helm3"])
def test_everything_is_null(binary: str, tmp_path: Path) -> None:
    sets = [part for path in LEVELS if len(path) == 1 for part in ("--set", f"{path[0]}=null")]
    assert template(binary, CHART, *sets) == plain(binary)
    file = tmp_path / "values.yaml"
    keys = [(*path, key) for path, leaves in LEVELS.items() for key in leaves]
    file.write_text(yaml.safe_dump(merged((key, None) for key in keys)))
    assert template(binary, CHART, "-f", str(file)) == plain(binary)


@pytest.mark.parametrize("binary", ["helm", "helm3"])
def test_values_of_an_older_release(binary: str, tmp_path: Path) -> None:
    """--reuse-values: the chart is newer than the values, which lack its keys."""
    chart = tmp_path / "leeway"
    shutil.copytree(CHART, chart)
    (chart / "values.yaml").write_text("{}\n")
    assert template(binary, chart) == plain(binary)
    (chart / "values.yaml").write_text("sampler: {replicas: 2}\nredis: {enabled: true}\n")
    assert template(binary, chart) == plain(binary)


@pytest.mark.parametrize("path", ["podMonitor", "serviceMonitor"])
def test_parts_that_are_off_by_default(path: str) -> None:
    """What a null leaves alone when the part around it is switched on."""
    on = ["--set", f"telemetry.{path}.enabled=true", "--set", "networkPolicy.enabled=true"]
    on += ["--set", "sampler.autoscaling.enabled=true", "--set", "modelCache.enabled=true"]
    nulls = [f"telemetry.{path}.labels", "networkPolicy.metricsFrom", "networkPolicy.extraIngress"]
    nulls += ["sampler.autoscaling.keda", "sampler.autoscaling.hpa", "modelCache.accessModes"]
    nulls += ["modelCache.annotations", f"telemetry.{path}.interval"]
    sets = [part for key in nulls for part in ("--set", f"{key}=null")]
    assert template("helm", CHART, *on, *sets) == template("helm", CHART, *on)


def test_external_redis() -> None:
    on = ["--set", "redis.enabled=false,externalRedis.host=h,externalRedis.existingSecret=s"]
    nulls = ["redis.auth", "externalRedis.users", "externalRedis.tls", "externalRedis.port"]
    sets = [part for key in nulls for part in ("--set", f"{key}=null")]
    assert template("helm", CHART, *on, *sets) == template("helm", CHART, *on)


SECTIONS = [
    "model",
    "task",
    "sampling",
    "batch",
    "correction",
    "sync",
    "weights",
    "sampler",
    "trainer",
    "redis",
]


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_of_the_run_that_is_null(section: str, tmp_path: Path) -> None:
    """The default of the section, or the schema's message; never an error of a template."""
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"run": {**RUN, section: None}}))
    done = helm("helm", "template", "demo", str(CHART), "-f", str(file))
    assert not GO_ERRORS.search(done.stderr), done.stderr
    assert done.returncode == 0 or f"run/{section}" in done.stderr or f"run.{section}" in done.stderr


def test_a_null_within_a_kubernetes_object_removes_the_key() -> None:
    """OpenShift assigns user ids: its users write podSecurityContext.runAsUser: null."""
    text = template("helm", CHART, "--set", "sampler.podSecurityContext.runAsUser=null")
    pod = next(d for d in yaml.safe_load_all(text) if d and d["metadata"]["name"].endswith("-sampler")
               and d["kind"] == "Deployment")["spec"]["template"]["spec"]  # fmt: skip
    assert "runAsUser" not in pod["securityContext"] and pod["securityContext"]["runAsNonRoot"] is True
