"""Exports: from a checkpoint they equal the trainer's own; everything but the weights stays as it came."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_support import make_batch, micro_batches, run_config, save_tiny_model

from leeway.checkpoints.state import MODEL_FILES, CheckpointError, TrainState
from leeway.errors import UsageError
from leeway.models.base import ModelError
from leeway.models.files import keep_model_files
from leeway_trainer.checkpoint import save_checkpoint
from leeway_trainer.export import export_checkpoint, export_model, main, rehearse_export
from leeway_trainer.learner import load_learner
from leeway_trainer.model import load_policy_model
from leeway_trainer.policy import Policy

GENERATION = '{"eos_token_id": 1, "pad_token_id": 0, "temperature": 0.6, "top_p": 0.9}'
"""transformers reads this, and refuses to write it: a temperature without do_sample."""


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_model(tmp_path_factory.mktemp("source"), tied=request.param)
    (directory / "generation_config.json").write_text(GENERATION)
    (directory / "tokenizer.json").write_text("anything")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"a_key_of_theirs": [1, 2]}))
    return directory


def trained(source: Path, ranks: object, stage: int, dtype: str) -> Policy:
    """A policy after one step."""
    trainer = run_config(source).trainer.model_dump() | {"zero_stage": stage, "dtype": dtype}
    config = run_config(source, trainer=trainer).trainer
    policy = Policy(load_policy_model(source, dtype=getattr(torch, dtype), chunk_tokens=5), config, ranks)  # type: ignore[arg-type]
    batches = micro_batches(make_batch())
    for i, batch in enumerate(batches):
        policy.backward(-policy.forward(batch, last=i == len(batches) - 1).logp.sum() / 40)
    policy.step(0)
    return policy


def save(run: Path, policy: Policy, source: Path, step: int = 1) -> Path:
    config = policy.config
    state = TrainState(
        next_batch=step,
        version=0,
        published_at=0,
        epoch=0,
        ranks=1,
        zero_stage=config.zero_stage,
        dtype=config.dtype,
        model=str(source),
    )
    keep_model_files(source, run / "checkpoints" / MODEL_FILES)
    return save_checkpoint(run / "checkpoints", policy, state, keep=2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_gives_the_model_that_the_trainer_exports(source, ranks, tmp_path, stage, dtype):
    policy = trained(source, ranks, stage, dtype)
    save(tmp_path, policy, source)
    export_model(tmp_path / "wanted", policy, step=1)
    found = export_checkpoint(tmp_path)
    assert found == tmp_path / "model"
    wanted = load_file(tmp_path / "wanted" / "model.safetensors")
    tensors = load_file(found / "model.safetensors")
    assert {k: v.dtype for k, v in tensors.items()} == {k: v.dtype for k, v in wanted.items()}
    assert [name for name in wanted if not torch.equal(tensors[name], wanted[name])] == []
    for directory in (found, tmp_path / "wanted"):
        modes = {path.name: path.stat().st_mode for path in directory.iterdir()}
        assert len(set(modes.values())) == 1, modes
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            assert (directory / name).read_bytes() == (source / name).read_bytes()
        load_policy_model(directory, dtype=torch.float32, chunk_tokens=5)  # no tensor is missing


def test_an_export_needs_the_run_directory_alone(source, ranks, tmp_path, capsys):
    """Not the model's own directory, and not the latest checkpoint: that one is damaged."""
    gone = Path(shutil.copytree(source, tmp_path / "gone"))
    policy = trained(gone, ranks, 0, "float32")
    run = tmp_path / "run"
    save(run, policy, gone, 1)
    newest = save(run, policy, gone, 2)
    shutil.rmtree(gone)
    (newest / "leeway.json").write_text("")
    with pytest.raises(CheckpointError, match="step-000002 is damaged: leeway.json.*--resume-from 1"):
        export_checkpoint(run)
    assert main([str(run), "--step", "1"]) == 0
    assert capsys.readouterr().out.strip() == str(run / "model-step-000001")
    assert main([str(run), "--step", "7"]) == 2
    assert "no checkpoint of step 7; there are: 1, 2" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    with pytest.raises(UsageError, match="exists and is not a model"):
        export_checkpoint(run, 1, tmp_path / "mine")


def test_an_export_replaces_an_old_one_and_leaves_it_if_it_fails(source, ranks, tmp_path, monkeypatch):
    policy = trained(source, ranks, 0, "float32")
    save(tmp_path, policy, source)
    export_checkpoint(tmp_path)
    (tmp_path / "model" / "old.txt").write_text("old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.save_torch_state_dict", full)
        with pytest.raises(OSError, match="No space left"):
            export_checkpoint(tmp_path)
    assert (tmp_path / "model" / "old.txt").exists()
    export_checkpoint(tmp_path)
    assert not (tmp_path / "model" / "old.txt").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "model"}


def test_a_rehearsal_leaves_nothing_and_names_what_fails(source, tmp_path):
    lm = load_policy_model(source, dtype=torch.float32, chunk_tokens=5).lm
    rehearse_export(lm, source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ModelError, match=r"has no config\.json"):
        rehearse_export(lm, tmp_path, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot be exported to .*set output\.save_model=false"):
        rehearse_export(lm, source, tmp_path / "file")


def test_a_trainer_that_could_not_export_ends_before_its_first_step(setup, ranks, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.save_torch_state_dict", full)
    with pytest.raises(ModelError, match=r"cannot be exported to .*No space left.*output\.save_model=false"):
        load_learner(run_config(setup.model), ranks, setup)
