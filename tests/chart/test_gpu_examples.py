"""The GPU examples as values of the chart, as docs/gpu-scale.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from leeway.config.load import load_config
from leeway.rewards import load_reward
from leeway.tasks import load_task

from .chart_support import ROOT, pick, render

GPU = sorted((ROOT / "examples").glob("gpu-*.yaml"))


def test_there_is_one_for_each_question() -> None:
    assert [path.stem for path in GPU] == [
        f"gpu-qwen3-{size}-{method}" for size in ("0.6b", "1.7b") for method in ("dlc", "score-centering")
    ]


@pytest.mark.parametrize("path", GPU, ids=lambda path: path.name)
def test_they_render(path: Path, tmp_path: Path) -> None:
    given = load_config(path, environ={})
    assert list(yaml.safe_load(path.read_text()))[-1] == "redis"  # the page's sed cuts from there on
    values = tmp_path / "run.yaml"
    kept = path.read_text().split("\nredis:")[0]
    values.write_text("run:\n" + "".join(f"  {line}\n" for line in kept.splitlines()))
    docs = render(values, run__task__reward="countdown:reward", data__configMap="countdown")
    values.write_text(pick(docs, "ConfigMap", "-run")["data"]["run.yaml"])
    rendered = load_config(values, environ={})
    assert rendered.task.reward == "countdown:reward"
    for section in ("model", "sampling", "batch", "correction", "sync"):
        assert getattr(rendered, section) == getattr(given, section), section
    trainer = pick(docs, "StatefulSet", "trainer")
    container = trainer["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_reward_wants_the_expression_between_its_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(GPU[0], environ={}).task
    task = load_task(config)
    reward, item = load_reward(config, task), task.item(0)
    numbers = item.metadata["numbers"]
    assert reward(item, f"First ... so <answer>{item.answer}</answer>") == 1
    assert reward(item, item.answer) == -1  # not between tags
    assert reward(item, f"<answer>{item.answer} + 1</answer>") == -1
    assert reward(item, f"<answer>{item.metadata['target']}</answer>") == -1  # not from the numbers
    assert (
        reward(item, f"<answer>{item.answer}</answer> or <answer>{numbers[0]}</answer>") == -1
    )  # the last counts
    assert reward(item, "<answer>(((</answer>") == -1
