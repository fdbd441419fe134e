"""`--resume auto`: a pod that is restarted resumes, a new one starts from the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from leeway.errors import UsageError
from leeway_trainer.__main__ import parse_args
from leeway_trainer.process import resume_from

COMMON = ["--config", "c", "--run", "r", "--redis", "redis://x"]


def test_auto_means_the_output_directory_once_it_has_a_checkpoint(tmp_path: Path) -> None:
    args = parse_args([*COMMON, "--out", str(tmp_path), "--resume", "auto"])
    assert resume_from(args) is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-000004\n")
    assert resume_from(args) == tmp_path


def test_a_given_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    args = parse_args([*COMMON, "--out", str(tmp_path), "--resume", "other"])
    assert resume_from(args) == Path("other")
    assert resume_from(parse_args([*COMMON, "--out", str(tmp_path)])) is None


def test_auto_resumes_where_the_pointer_was_lost(tmp_path: Path) -> None:
    args = parse_args([*COMMON, "--out", str(tmp_path), "--resume", "auto"])
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    assert resume_from(args) == tmp_path


def test_a_step_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    args = parse_args([*COMMON, "--out", str(tmp_path), "--resume", "auto", "--resume-from", "4"])
    with pytest.raises(UsageError, match="--resume-from 4: there is no checkpoint"):
        resume_from(args)
