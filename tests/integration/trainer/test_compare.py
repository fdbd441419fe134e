"""A saved batch, and every correction on it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_support import make_batch, run_config

from leeway.config.load import dump_config
from leeway.errors import UsageError
from leeway_trainer.compare import compare, main, parse_args, variants
from leeway_trainer.model import load_policy_model
from leeway_trainer.policy import Policy
from leeway_trainer.ranks import Ranks
from leeway_trainer.saved_batch import BatchInfo, find_batch, load_batch, save_batch
from leeway_trainer.snapshot import Snapshot, wire_tensors
from leeway_trainer.step import train_step


@pytest.fixture(scope="module")
def saved(tiny_dir: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the batches of steps 0 and 1, and grad_norms.json: what training found there."""
    out = tmp_path_factory.mktemp("run")
    config = run_config(tiny_dir, trainer={"learning_rate": 3e-2}, weights={"dtype": "float32"})
    model = load_policy_model(tiny_dir, dtype=torch.float32, chunk_tokens=5)
    snapshot = Snapshot(copy.deepcopy(model), config.trainer, ranks)
    policy = Policy(model, config.trainer, ranks)
    snapshot.refresh(wire_tensors(policy, torch.float32, step=0))
    norms = []
    for step in range(2):
        info = BatchInfo(step=step, age=step, version=0)
        save_batch(out / "batches", policy, snapshot, make_batch(step), config, info)
        norms.append(train_step(policy, snapshot, make_batch(step), config, step, age=step)["grad_norm"])
    (out / "grad_norms.json").write_text(json.dumps(norms))
    return out


def test_what_is_saved_is_what_was_there(saved: Path, tiny_dir: Path) -> None:
    info, rollouts, config = load_batch(find_batch(saved))
    assert (info.step, info.age) == (1, 1)
    assert config.trainer.learning_rate == 3e-2
    for got, want in zip(rollouts, make_batch(1), strict=True):
        assert got.header == want.header
        assert got.response_ids.tolist() == want.response_ids.tolist()
        assert got.head_logp.tolist() == want.head_logp.tolist()
    start, theta, theta_s = (
        dict(load_policy_model(place, dtype=torch.float32, chunk_tokens=5).lm.named_parameters())
        for place in (tiny_dir, find_batch(saved) / "theta", find_batch(saved) / "theta_s")
    )
    assert all(torch.equal(start[name], theta_s[name]) for name in start)
    assert any(not torch.equal(start[name], theta[name]) for name in start)


@pytest.mark.parametrize("step", [0, 1])
def test_gradients_are_those_of_training(saved: Path, step: int) -> None:
    result = compare(parse_args([str(saved / "batches" / f"step-{step:04d}")]))
    rows = {row["correction"]: row for row in result["corrections"]}
    assert list(rows) == [label for label, _ in variants(load_batch(find_batch(saved))[2].correction)]
    trained = json.loads((saved / "grad_norms.json").read_text())[step]
    assert rows["dlc"]["grad_norm"] == pytest.approx(trained, rel=1e-4)
    assert rows["dlc"]["cosine"] == pytest.approx(1)
    assert all(-1 - 1e-6 <= row["cosine"] <= 1 + 1e-6 and row["grad_norm"] > 0 for row in rows.values())
    # Equal by their formulas: with one optimiser step a batch pi_prox is pi_theta, so PPO does not clip.
    assert rows["ppo reference=prox"]["grad_norm"] == pytest.approx(rows["none"]["grad_norm"], rel=1e-5)
    assert rows["none"]["weight_ess"] == pytest.approx(1)
    assert rows["is"]["weight_ess"] < 0.9  # made-up log-probabilities: far from the model's
    assert rows["tis"]["weight_mean"] <= 2
    if step == 0:  # no lag: nothing to clip, and DLC is score centring
        assert rows["dlc"]["clipped"] == 0
        assert rows["dlc"]["grad_norm"] == pytest.approx(rows["score_centering"]["grad_norm"], rel=1e-3)
        assert rows["score_centering"]["cosine"] == pytest.approx(1, abs=1e-4)
        assert result["lag"]["lag/ess_tok"] == 1
    else:
        assert rows["dlc"]["clipped"] > 0
        assert result["lag"]["lag/ess_tok"] < 1


def test_settings_can_be_changed(saved: Path) -> None:
    loose = compare(parse_args([str(saved), "--set", "correction={method: tis, clip: 100.0}"]))
    default = compare(parse_args([str(saved)]))

    def tis(result: dict[str, object]) -> float:
        return next(r for r in result["corrections"] if r["correction"] == "tis")["weight_mean"]  # type: ignore

    assert tis(loose) > tis(default)


def test_weights_of_responses_leave_the_centred_rows_by_token(saved: Path) -> None:
    _, _, config = load_batch(find_batch(saved), ["correction={method: tis, level: sequence}"])
    levels = dict(variants(config.correction))
    assert levels["tis"].level == "sequence"
    assert levels["tis + score_centering"].level == "token"


def test_another_shape_of_the_batch_is_rejected(saved: Path) -> None:
    for sets in (["batch.prompts=3"], ["batch.prompts=3", "batch.group_size=2"]):
        with pytest.raises(UsageError, match="do not change these settings"):
            load_batch(find_batch(saved), sets)


def test_the_command_prints_a_table_or_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(saved)]) == 0
    table = capsys.readouterr().out
    assert "weights 1 steps old" in table
    assert "ppo reference=sync" in table
    assert main([str(saved), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["corrections"]) == len(variants(load_batch(find_batch(saved))[2].correction))


@pytest.mark.slow
def test_the_command_of_leeway(saved: Path) -> None:
    command = [sys.executable, "-m", "leeway_host", "corrections", "compare", str(saved)]
    table = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert table.returncode == 0, table.stderr
    assert "ppo reference=sync" in table.stdout


def test_a_directory_without_a_batch_is_rejected(
    tmp_path: Path, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "output.save_batches" in caplog.text
    broken = tmp_path / "batches" / "step-0000"
    broken.mkdir(parents=True)
    source = find_batch(saved)
    (broken / "batch.json").write_text((source / "batch.json").read_text())
    (broken / "config.yaml").write_text(dump_config(load_batch(source)[2]))
    (broken / "rollouts.bin").write_bytes((source / "rollouts.bin").read_bytes()[:-5])
    assert main([str(tmp_path)]) == 2
    assert "rollouts end" in caplog.text or "cannot be read" in caplog.text
