"""The output directory: one run at a time, nothing overwritten."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from leeway.config.load import build_config
from leeway.errors import UsageError
from leeway_host.launch.claims import check_checkpoint, claimed, default_out, only_export_is_left
from leeway_host.launch.local import LocalRun

CONFIG = build_config({"task": {"kind": "digits"}, "name": "t", "model": {"name": "tiny"}})


def checkpoint(out: Path, **change: object) -> None:
    state = {"ranks": 1, "zero_stage": 0, "dtype": "bfloat16", "model": "tiny", "next_batch": 5, **change}
    state |= {"version": 1, "published_at": 4, "epoch": 1}
    directory = out / "checkpoints" / "step-000005"
    (directory / "deepspeed").mkdir(parents=True)
    (directory / "deepspeed" / "weights.pt").write_text("weights")
    (directory / "leeway.json").write_text(json.dumps(state))
    (out / "checkpoints" / "latest").write_text("step-000005\n")


def test_a_directory_belongs_to_one_run(tmp_path: Path) -> None:
    words = f"in use by the run of process {os.getpid()}"
    with claimed(tmp_path, False), pytest.raises(UsageError, match=words), claimed(tmp_path, False):
        pass
    with claimed(tmp_path, resume=False):
        pass


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run there"), claimed(tmp_path, resume=True):
        pass
    (tmp_path / "metrics.jsonl").write_text("")  # stopped before its first step: nothing is lost
    with claimed(tmp_path, resume=False):
        pass
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="already contains a run"), claimed(tmp_path, resume=False):
        pass
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / ("n" * 300)):
        with pytest.raises(UsageError, match="cannot be used"), claimed(bad, resume=False):
            pass


def test_two_default_directories_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = default_out(CONFIG)
    first.mkdir(parents=True)
    assert default_out(CONFIG) != first


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path) -> None:
    assert check_checkpoint(tmp_path, CONFIG) is False
    checkpoint(tmp_path)
    assert check_checkpoint(tmp_path, CONFIG) is True
    for number, change in enumerate(
        ({"zero_stage": 2}, {"dtype": "float32"}, {"ranks": 2}, {"model": "x/y"})
    ):
        out = tmp_path / str(number)
        checkpoint(out, **change)
        with pytest.raises(UsageError, match=f"written with {next(iter(change))}="):
            check_checkpoint(out, CONFIG)
    done = tmp_path / "done"
    checkpoint(done, next_batch=20)
    assert check_checkpoint(done, CONFIG) is True  # its model was not exported
    assert only_export_is_left(done, CONFIG)
    (done / "model").mkdir()
    (done / "model" / "config.json").write_text("{}")
    assert only_export_is_left(done, CONFIG)
    (done / "model" / "model.safetensors").write_text("")
    assert not only_export_is_left(done, CONFIG)
    with pytest.raises(UsageError, match="20 of trainer.steps=20 steps are already done"):
        check_checkpoint(done, CONFIG)


def test_a_refused_resume_leaves_a_good_run_as_it_was(tmp_path: Path) -> None:
    checkpoint(tmp_path, zero_stage=3)
    (tmp_path / "config.yaml").write_text("name: old\n")
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    result = LocalRun(CONFIG, tmp_path, resume=True).run()
    assert result.exit_code == 2
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "completed"}
    assert (tmp_path / "config.yaml").read_text() == "name: old\n"


@pytest.mark.parametrize(("resume_from", "words"), [(None, "is empty"), (7, "no checkpoint of step 7")])
def test_a_resume_is_refused_before_the_preflight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume_from: int | None, words: str
) -> None:
    def preflight(*_: object) -> Path:
        raise AssertionError("a preflight of a run that cannot be resumed")

    monkeypatch.setattr("leeway_host.launch.local.require_ready", preflight)
    checkpoint(tmp_path)
    (tmp_path / "config.yaml").write_text("name: old\n")
    (tmp_path / "checkpoints" / "latest").write_text("")
    result = LocalRun(CONFIG, tmp_path, resume=True, resume_from=resume_from, preflight=True).run()
    assert result.exit_code == 2 and words in result.summary["error"]
    if resume_from is None:
        assert result.summary["reason"]["next"] == f"leeway run --resume {tmp_path} --resume-from 5"


def test_a_bug_ends_with_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LocalRun) -> Path:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(LocalRun, "prepare_model", fail)
    result = LocalRun(CONFIG, tmp_path / "out").run()
    assert result.exit_code == 1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "ZeroDivisionError: planted" in summary["error"]
