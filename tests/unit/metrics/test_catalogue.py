"""The catalogue: what it must say about each metric, families, duplicates, metrics of installed packages."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from leeway.config.load import build_config
from leeway.corrections import lag_metrics
from leeway.errors import UsageError
from leeway.messages import ReportHeader
from leeway.metrics import AREAS, Metric, MetricFamily, all_metrics, find_metric, status_metrics
from leeway.metrics.areas.discrepancy import DISC_KL, DISC_KL_SAMPLER
from leeway.metrics.areas.lag import LAG_ESS_TOK
from leeway.metrics.page import metrics_page
from leeway_host.launch.table import columns


@pytest.mark.parametrize("metric", all_metrics().values(), ids=str)
def test_a_metric_is_documented_and_its_series_can_be_fed(metric: Metric) -> None:
    assert metric.help.endswith(".")
    assert re.fullmatch(r"[a-z_0-9]+(/[a-z_0-9]+)*(/<[a-z]+>)?", metric)
    assert metric.recorded or metric.series, "neither in metrics.jsonl nor at /metrics"
    for series in metric.series:
        assert series.name.startswith("leeway_")
        assert bool(series.buckets) == (series.kind == "histogram")
        if metric.recorded:  # nobody is there to give label values
            assert len(series.values) == len(series.labels)


def test_a_constant_is_the_name_in_capitals() -> None:
    for area, metrics in AREAS.items():
        module = vars(import_module(f"leeway.metrics.areas.{area}"))
        constants = {name: value for name, value in module.items() if isinstance(value, Metric)}
        wanted = {re.sub(r"\W+", "_", metric).strip("_").upper(): metric for metric in metrics}
        assert constants == wanted


def test_series_of_one_name_agree() -> None:
    series: dict[str, tuple[object, ...]] = {}
    for metric in all_metrics().values():
        for one in metric.series:
            facts = (one.service, one.kind, one.help, one.labels, one.buckets)
            assert series.setdefault(one.name, facts) == facts


def test_a_family_has_a_member_per_sampler() -> None:
    assert isinstance(DISC_KL_SAMPLER, MetricFamily)
    assert DISC_KL_SAMPLER.of("sampler-0") == "disc/kl/sampler-0"
    assert DISC_KL_SAMPLER.member("disc/kl/sampler-0") == "sampler-0"
    assert DISC_KL_SAMPLER.member(DISC_KL) is None
    assert find_metric("disc/kl/sampler-0") is DISC_KL_SAMPLER
    assert find_metric("disc/kl") is DISC_KL
    assert find_metric("disc/other") is None


def test_a_metric_is_its_name_on_the_wire_and_in_files() -> None:
    header = ReportHeader(event="step", epoch=0, step=0, version=0, metrics={LAG_ESS_TOK: 0.5})
    again = ReportHeader.model_validate_json(header.model_dump_json())
    assert again.metrics == {"lag/ess_tok": 0.5}
    assert json.dumps({LAG_ESS_TOK: 1}) == '{"lag/ess_tok": 1}'
    assert f"{LAG_ESS_TOK}" == "lag/ess_tok"
    assert copy.deepcopy({LAG_ESS_TOK: 1}) == {"lag/ess_tok": 1}


def test_a_name_that_two_areas_declare_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Metric("lag/ess_tok", unit="", help="Theirs.")
    monkeypatch.setattr("leeway.metrics.catalogue.AREAS", {"lag": AREAS["lag"], "theirs": (one,)})
    with pytest.raises(UsageError, match="'lag/ess_tok' is declared by both area 'lag' and area 'theirs'"):
        all_metrics.__wrapped__()
    monkeypatch.setattr("leeway.metrics.catalogue.AREAS", {"theirs": ("lag/theirs",)})
    with pytest.raises(UsageError, match=r"expected leeway\.metrics\.Metric, got str 'lag/theirs'"):
        all_metrics.__wrapped__()


def test_table_and_status_show_what_the_catalogue_marks() -> None:
    assert [name for name, _ in columns()] == [
        "reward/mean", "lag/ess_tok", "lag/ess_seq", "lag/age", "weights/version", "sampler/tokens_per_s",
        "trainer/tokens_per_s",
    ]  # fmt: skip
    assert status_metrics() == [
        "reward/mean", "lag/ess_tok", "lag/ess_seq", "lag/age", "time/step_s", "grad_norm",
    ]  # fmt: skip


def test_what_lag_metrics_returns_is_declared() -> None:
    import torch

    x, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    config = build_config({"task": {"kind": "digits"}}).correction
    found = lag_metrics(x, x, x, mask, torch.tensor([0, 0, 1, 1]), x, config)
    assert not [name for name in found if find_metric(name) is None]


def test_the_page_has_every_metric_and_series() -> None:
    page = metrics_page()
    for metric in all_metrics().values():
        assert f"`{metric}`" in page or not metric.recorded
        assert all(f"`{series.name}" in page for series in metric.series)


THEIRS = """
from leeway.metrics import Column, Metric, Series


def longest_share(data):
    return max(data.lengths) / sum(data.lengths)


METRICS = (
    Metric(
        "theirs/longest_share",
        unit="share",
        help="Share of the batch's tokens in its longest response.",
        measure=longest_share,
        column=Column(35, "longest", ".2f"),
        series=(Series("trainer", "theirs_longest_ratio", "gauge", "Share of the longest response"),),
    ),
)
"""
USE = """
from types import SimpleNamespace
import numpy
from prometheus_client import REGISTRY
from leeway.metrics import StepData, measure
from leeway_host.launch.table import columns
from leeway.telemetry.prometheus import Exporter
header = SimpleNamespace(reward=1.0, reward_error=None, finish_reason="stop")
rollouts = [SimpleNamespace(header=header, response_ids=numpy.zeros(n)) for n in (1, 3)]
values = measure(StepData(step=0, age=0, tokens=None, rollouts=rollouts))
exporter = Exporter("trainer")
exporter.record_step(values)
titles = [column.title for _, column in columns()]
print(values["theirs/longest_share"], titles[3], REGISTRY.get_sample_value("theirs_longest_ratio"))
"""


def test_an_installed_package_adds_a_metric(tmp_path: Path) -> None:
    (tmp_path / "their_metrics.py").write_text(THEIRS)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[leeway.metrics]\ntheirs = their_metrics:METRICS\n")
    path = [str(tmp_path), *filter(None, sys.path)]
    code = f"import sys; sys.path[:0] = {path!r}\n{USE}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["0.75", "longest", "0.75"]
