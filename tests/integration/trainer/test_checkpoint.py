"""Checkpoints: resumed training continues as if nothing had happened; publishing is atomic."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from trainer_support import VOCABULARY, make_batch, micro_batches, run_config

from leeway.checkpoints.damage import record_files
from leeway.checkpoints.find import find_checkpoint
from leeway.checkpoints.state import STATE_FILE, CheckpointError, TrainState, read_state
from leeway.errors import UsageError
from leeway_trainer import checkpoint as ckpt
from leeway_trainer import export
from leeway_trainer.export import export_model
from leeway_trainer.model import load_policy_model
from leeway_trainer.policy import Policy
from leeway_trainer.safe_loading import weights_only
from leeway_trainer.snapshot import Snapshot, wire_tensors

STAGES = [0, 1, 2, 3]


def make_policy(tiny_dir, ranks, stage, dtype="float32") -> Policy:
    config = run_config(tiny_dir)
    trainer = dict(config.trainer.model_dump(), zero_stage=stage, dtype=dtype)
    config = run_config(tiny_dir, trainer=trainer).trainer
    return Policy(load_policy_model(tiny_dir, dtype=getattr(torch, dtype), chunk_tokens=5), config, ranks)


def train(policy: Policy, step: int) -> float:
    batches, total = micro_batches(make_batch(step)), 0.0
    for i, batch in enumerate(batches):
        logp, head = policy.forward(batch, last=i == len(batches) - 1)[:2]
        loss = -(logp.sum() + 0.1 * head.sum()) / 40
        policy.backward(loss)
        total += float(loss.detach())
    policy.step(step)
    return total


def state(step: int, stage: int = 0, dtype: str = "float32") -> TrainState:
    return TrainState(
        next_batch=step, version=2, published_at=1, epoch=1, ranks=1, zero_stage=stage, dtype=dtype, model="m"
    )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_continues_the_same_trajectory(tiny_dir, ranks, tmp_path, stage, dtype):
    policy = make_policy(tiny_dir, ranks, stage, dtype)
    for step in range(2):
        train(policy, step)
    ckpt.save_checkpoint(tmp_path, policy, state(2, stage, dtype), keep=2)
    want = [train(policy, step) for step in range(2, 5)]
    final = dict(wire_tensors(policy, torch.float32, step=5))
    final = {name: tensor.clone() for name, tensor in final.items()}

    resumed = make_policy(tiny_dir, ranks, stage, dtype)
    found = ckpt.load_checkpoint(find_checkpoint(tmp_path), resumed)
    assert (found.next_batch, found.version, found.published_at) == (2, 2, 1)
    assert [train(resumed, step) for step in range(2, 5)] == pytest.approx(want, rel=1e-6)
    for name, tensor in wire_tensors(resumed, torch.float32, step=5):
        torch.testing.assert_close(tensor, final[name], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_can_be_gathered_and_scored_after_a_checkpoint(tiny_dir, ranks, tmp_path, stage):
    policy = make_policy(tiny_dir, ranks, stage, "bfloat16")
    model = load_policy_model(tiny_dir, dtype=torch.bfloat16, chunk_tokens=5)
    snapshot = Snapshot(copy.deepcopy(model), policy.config, ranks)
    train(policy, 0)
    ckpt.save_checkpoint(tmp_path, policy, state(1, stage, "bfloat16"), keep=1)
    snapshot.refresh(wire_tensors(policy, torch.bfloat16, step=1))
    batch = micro_batches(make_batch())[0]
    assert torch.equal(snapshot.score(batch)[0], policy.forward(batch, last=True)[0].detach())


def test_only_whole_checkpoints_are_found_and_the_newest_are_kept(tiny_dir, ranks, tmp_path, monkeypatch):
    policy = make_policy(tiny_dir, ranks, 0)
    for step in (1, 2, 3):
        ckpt.save_checkpoint(tmp_path / "checkpoints", policy, state(step), keep=2)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-000002", "step-000003"]

    def die(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(ckpt, "sync_tree", die)
    with pytest.raises(OSError, match="disk full"):
        ckpt.save_checkpoint(tmp_path / "checkpoints", policy, state(4), keep=2)
    assert read_state(find_checkpoint(tmp_path)).next_batch == 3
    monkeypatch.undo()
    ckpt.save_checkpoint(tmp_path / "checkpoints", policy, state(4), keep=1)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-000004"]


def test_what_cannot_be_resumed_says_why(tiny_dir, ranks, tmp_path):
    with pytest.raises(UsageError, match="no checkpoint in"):
        find_checkpoint(tmp_path)
    policy = make_policy(tiny_dir, ranks, 0)
    saved = ckpt.save_checkpoint(tmp_path, policy, state(1), keep=1)
    with pytest.raises(UsageError, match=r"\(1, 0, 'float32'\), this run has \(1, 2, 'float32'\)"):
        ckpt.load_checkpoint(saved, make_policy(tiny_dir, ranks, 2))
    (saved / STATE_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match="next_batch"):
        read_state(saved)


@pytest.mark.parametrize("stage", [0, 3])
def test_exported_model_is_the_policy(tiny_dir, ranks, tmp_path, stage):
    policy = make_policy(tiny_dir, ranks, stage)
    train(policy, 0)
    export_model(tmp_path / "model", policy, step=1)
    loaded = load_policy_model(tmp_path / "model", dtype=torch.float32, chunk_tokens=5)
    batch = micro_batches(make_batch())[0]
    torch.testing.assert_close(loaded(batch)[0], policy.forward(batch, last=True)[0], atol=1e-6, rtol=0)
    assert loaded.lm.get_output_embeddings().weight.shape[0] == VOCABULARY
    assert loaded.lm.get_output_embeddings().weight is loaded.lm.get_input_embeddings().weight


class Planted:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.mark),))


class StoredAsAttribute:
    """What `getattr` finds, as Python 3.11.2 stores members of enumerations."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[object, ...]:
        return (getattr, (self.owner, self.name))


def test_only_members_of_enumerations_may_be_attributes(tmp_path):
    file = tmp_path / "stage.pt"
    torch.save({"stage": StoredAsAttribute(ZeroStageEnum, "weights")}, file)
    with weights_only(tmp_path):
        assert torch.load(file)["stage"] is ZeroStageEnum.weights
    torch.save({"stage": StoredAsAttribute(LossScaler, "__init__")}, file)
    told = pytest.raises(CheckpointError, match="holds more than weights.*getattr of .*LossScaler")
    with told, weights_only(tmp_path):
        torch.load(file)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_code_in_a_checkpoint_is_not_run(tiny_dir, ranks, tmp_path, stage):
    policy = make_policy(tiny_dir, ranks, stage)
    saved = ckpt.save_checkpoint(tmp_path / "checkpoints", policy, state(1, stage), keep=1)
    mark = tmp_path / "was-run"
    for file in (saved / ckpt.ENGINE_TAG).glob("*.pt"):
        content = torch.load(file, weights_only=False)
        torch.save({**content, "planted": Planted(mark)}, file)
    whole = read_state(saved).model_copy(update={"files": record_files(saved)})
    (saved / STATE_FILE).write_text(whole.model_dump_json())
    with pytest.raises(CheckpointError, match=r"holds more than weights and was not loaded.*mkdir"):
        ckpt.load_checkpoint(saved, policy)
    with pytest.raises(CheckpointError, match=r"holds more than weights and was not loaded.*mkdir"):
        export._read_engine(saved, read_state(saved))
    assert not mark.exists()
