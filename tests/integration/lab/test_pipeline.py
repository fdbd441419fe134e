"""Runs of the lab through `leeway run`: what it is told, and what is made of what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leeway.config import SyncConfig
from leeway.errors import UsageError
from leeway.messages import ReportHeader, VerdictHeader
from leeway_host.launch.record import Recorder
from leeway_lab import pipeline
from leeway_lab.measure import Divergence
from leeway_lab.model import MAX_LENGTH, Task, base_directory, load_base
from leeway_lab.pipeline import PipelineFailed, build_config, read_result, run_pipeline
from leeway_lab.spec import ModelSpec, RunSpec, experiments
from leeway_lab.store import execute_all, load, path_of
from leeway_trainer.export import write_model

SMALL = ModelSpec(hidden=32, layers=1, heads=2, length=4, target_accuracy=1e-6)
SPECS = [
    spec
    for experiment in experiments().values()
    for runs in experiment.runs().values()
    for spec in runs
    if spec.engine == "pipeline"
]


def small(**over: object) -> RunSpec:
    settings = {
        "engine": "pipeline", "model": SMALL, "steps": 3, "prompts": 4, "group_size": 4, "marks": (0, 1, 3),
        "learning_rate": 1e-3, "sync": SyncConfig(max_age=None), **over,
    }  # fmt: skip
    return RunSpec.model_validate(settings)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEEWAY_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "lab-cache"))


def test_every_spec_is_a_run_that_leeway_run_takes(tmp_path: Path) -> None:
    assert SPECS
    for spec in SPECS:
        config = build_config(spec, tmp_path)
        assert config.trainer.dtype == config.weights.dtype == "float32"
        assert (config.seed, config.order_seed) == (spec.seed, 0)  # other responses to the same prompts
        assert config.correction == spec.correction
        rules = ("ess_threshold", "ess_level", "clip_fraction", "max_age", "every_n")
        assert all(getattr(config.sync, rule) == getattr(spec.sync, rule) for rule in rules)
        assert config.sync.max_lead == (0 if spec.sync.max_age == 1 else 1)
    assert not any(e.quick for e in experiments().values() if e.common.get("engine") == "pipeline")


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"condition": {"weights": "int8"}}, "condition.weights=int8"),
        ({"condition": {"noise": 0.1}}, "condition.noise=0.1"),
        ({"fault": "top_p"}, "fault=top_p"),
        ({"optimizer": "sgd"}, "optimizer=sgd"),
        ({"evaluate_every": 2}, "evaluate_every=2"),
        ({"excess": True}, "excess=true"),
    ],
)
def test_what_only_the_lab_has_is_refused(tmp_path: Path, over: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=f"engine=pipeline has no {named}"):
        build_config(small(**over), tmp_path)


def test_training_leaves_the_prompts_alone_that_kl_is_taken_on(tmp_path: Path) -> None:
    _, tokenizer = load_base(SMALL)
    lab = Task(SMALL, tokenizer)
    config = build_config(small(), tmp_path)
    assert config.task.size == lab.size - pipeline.HELD_OUT
    trained = Task(SMALL, tokenizer, config.task.size)
    assert torch.equal(trained.prompts, lab.prompts[: config.task.size])
    assert trained.prompts.shape[1] + config.sampling.max_new_tokens <= MAX_LENGTH


def test_runs_of_both_engines_are_kept_apart() -> None:
    lab = RunSpec()
    assert RunSpec(engine="pipeline").key() != lab.key()
    assert lab.key() == RunSpec.model_validate(lab.model_dump()).key()


class Finished:
    """A run's directory, written by the product's own writers."""

    def __init__(self, directory: Path, spec: RunSpec, dtype: torch.dtype = torch.float32) -> None:
        self.directory, self.spec = directory, spec
        self.model, _ = load_base(spec.model)
        self.recorder = Recorder(directory, build_config(spec, directory))
        self.model.config.save_pretrained(directory / "source")
        self.states: dict[str, dict[str, Tensor]] = {}
        for number, place in enumerate(("batches/step-0000/theta", "batches/step-0001/theta", "model")):
            state = {n: (p + number).to(dtype) for n, p in self.model.named_parameters()}
            write_model(directory / place, self.model, state.items(), directory / "source", keep=True)  # type: ignore[arg-type]
            self.states[place] = state

    def step(self, step: int, version: int, epoch: int = 0) -> None:
        metrics: dict[str, float | str] = {"reward/mean": 0.5, "lag/var": 0.04, "batch/digest": "ab"}
        report = ReportHeader(
            event="step", epoch=epoch, step=step, version=version, age=1, metrics=metrics
        )  # fmt: skip
        self.recorder.step(report)

    def verdict(self, step: int, reason: str | None) -> None:
        action = "resync" if reason else "continue"
        self.recorder.verdict(
            VerdictHeader.model_validate({"epoch": 0, "step": step, "action": action, "reason": reason})
        )


def test_a_finished_run_becomes_a_result_of_the_lab(tmp_path: Path) -> None:
    spec = small()
    run = Finished(tmp_path, spec)
    for step, version, reason in ((0, 0, None), (1, 0, "ess"), (2, 1, "age")):
        run.step(step, version)
        run.verdict(step, reason)
    result = read_result(tmp_path, spec)
    assert [row["step"] for row in result.rows] == [0, 1, 2]
    assert result.rows[0]["lag/sd"] == pytest.approx(0.2)
    assert "batch/digest" not in result.rows[0]  # text
    assert result.resyncs == [(1, "ess")]  # nothing follows the last step, whatever was decided
    for mark, place in ((0, "batches/step-0000/theta"), (1, "batches/step-0001/theta"), (3, "model")):
        assert set(result.weights[mark]) == set(run.states[place])
        assert all(torch.equal(v, run.states[place][n]) for n, v in result.weights[mark].items())
    # The measures take them: no KL between equal weights, some between others.
    model, tokenizer = load_base(SMALL)
    divergence = Divergence(model, Task(SMALL, tokenizer), 8)
    same, other = divergence.kl(result.weights[0], [result.weights[0], result.weights[3]])
    assert same.max() < 1e-6
    assert other.mean() > 1e-3


def test_a_run_that_is_not_the_whole_spec_is_refused(tmp_path: Path) -> None:
    spec = small()
    run = Finished(tmp_path, spec)
    run.step(0, 0)
    run.step(1, 0)
    with pytest.raises(PipelineFailed, match="has steps .0. of 1 run epochs, expected 0 to 2 of one"):
        read_result(tmp_path, spec)
    run.step(2, 0, epoch=1)
    run.recorder.flush()
    with pytest.raises(PipelineFailed, match="of 2 run epochs"):
        read_result(tmp_path, spec)


def test_weights_that_were_rounded_on_the_way_are_refused(tmp_path: Path) -> None:
    spec = small()
    run = Finished(tmp_path, spec, torch.bfloat16)
    for step in range(3):
        run.step(step, 0)
    run.recorder.flush()
    with pytest.raises(PipelineFailed, match="expected float32 weights"):
        read_result(tmp_path, spec)
    with pytest.raises(PipelineFailed, match="holds no weights, expected those after 2 steps"):
        read_result(tmp_path, small(marks=(2,)))


def test_a_run_that_fails_leaves_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "base_directory", lambda spec: tmp_path / "nowhere")
    with pytest.raises(PipelineFailed, match="exit status 2; .*run.log ends with:(.|\n)*nowhere is not a"):
        run_pipeline(small(), tmp_path / "run")
    assert "nowhere is not a directory" in (tmp_path / "run.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_product_runs_a_spec(tmp_path: Path) -> None:
    spec = small(sync=SyncConfig(ess_threshold=None, max_age=1))
    assert execute_all(tmp_path, [spec], jobs=2) == 1
    assert execute_all(tmp_path, [spec], jobs=2) == 0
    assert path_of(tmp_path, spec).exists()
    result = load(tmp_path, spec)
    assert result.resyncs == [(0, "age"), (1, "age")]
    for row in result.rows:
        assert row["lag/age"] == 0
        assert row["lag/ess_seq"] > 0.9999
        assert row["disc/abs_mean"] < 1e-4
    model, _ = load_base(SMALL)
    names = {name for name, _ in model.named_parameters()}
    assert all(set(weights) == names for weights in result.weights.values())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.weights[0][name], parameter.data, atol=0, rtol=0)
    moved = [float((result.weights[3][n] - result.weights[0][n]).abs().max()) for n in names]
    assert 1e-3 < max(moved) < 1e-2  # three steps of AdamW at a rate of 1e-3
    left = tmp_path / "pipeline" / spec.key()
    assert json.loads((left / "summary.json").read_text())["status"] == "completed"
    assert not (left / "batches").exists()
    assert base_directory(SMALL).is_dir()
