"""The lab trains as the product does, repeats itself, and continues where it was stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from leeway.config import RunConfig, build_correction
from leeway.errors import UsageError
from leeway.messages import Rollout, RolloutHeader
from leeway_host.cli.app import app
from leeway_lab.model import Drawn
from leeway_lab.spec import NEVER, Condition, ModelSpec, RunSpec
from leeway_lab.store import execute, execute_all, load, path_of
from leeway_lab.train import Trainer, train

SMALL = ModelSpec(hidden=32, layers=1, heads=2, length=4, target_accuracy=1e-6)


def small(**over: object) -> RunSpec:
    settings = {
        "model": SMALL, "steps": 3, "prompts": 4, "group_size": 4, "marks": (1, 3), "learning_rate": 1e-3,
        "sync": NEVER, **over,
    }  # fmt: skip
    return RunSpec.model_validate(settings)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As `execute` has it: another number of threads gives other last digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEEWAY_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "lab-cache"))


def as_rollouts(drawn: Drawn, rewards: torch.Tensor, group_size: int) -> list[Rollout]:
    """The batch as samplers would send it, with the whole vocabulary as head."""
    rollouts = []
    for i, (ids, mask, logp) in enumerate(zip(drawn.responses, drawn.mask, drawn.logp, strict=True)):
        tokens, laws = ids[mask].numpy().astype(np.int32), logp[mask].numpy().astype(np.float32)
        count, size = laws.shape
        header = RolloutHeader(
            ticket_id=f"t{i}", epoch=0, version=0, batch=0, group=i // group_size, index=i % group_size,
            item=0, sampler="s", finish_reason="stop", reward=float(rewards[i]), spans=[(0, count, 0)],
        )  # fmt: skip
        rollouts.append(
            Rollout(
                header=header,
                prompt_ids=drawn.ids[i, : drawn.prompt].numpy().astype(np.int32),
                response_ids=tokens,
                logp=laws[np.arange(count), tokens],
                head_offsets=(np.arange(count + 1) * size).astype(np.int32),
                head_ids=np.tile(np.arange(size), count).astype(np.int32),
                head_logp=laws.reshape(-1),
            )
        )
    return rollouts


@pytest.mark.parametrize("method", ["dlc", "score_centering", "is", "gspo", "m2po"])
def test_gradients_equal_the_trainers(tmp_path: Path, method: str) -> None:
    from leeway_trainer.compare import SavedStep

    spec = small(condition=Condition(weights="int4"), correction=build_correction({"method": method}))
    lab = Trainer(spec)
    lab.step(0)  # so that there is lag
    _, drawn, rewards = lab.sample(1)
    rewards[0] += 0.5  # some variance, whatever the model can do
    batch = lab.batch(drawn, rewards, age=1)
    lab.optimizer.step = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    lab.gradient_step(batch, step=1)

    for name, model in (("theta", lab.theta), ("theta_s", lab.theta_s)):
        model.save_pretrained(tmp_path / name)  # type: ignore[operator]
    config = RunConfig.model_validate(
        {
            "model": {"name": str(tmp_path / "theta"), "max_length": 48},
            "task": {"kind": "digits"},
            "sampling": {"max_new_tokens": lab.task.max_new},
            "batch": {"prompts": 4, "group_size": 4},
            "correction": {"method": method},
            "trainer": {"dtype": "float32", "micro_batch_tokens": 64},
        }
    )
    saved = SavedStep(tmp_path, as_rollouts(drawn, rewards, 4), config, age=1)
    gradient, _ = saved.gradient(config.correction)
    theirs = dict(
        zip((n for n, p in saved.theta.named_parameters() if p.requires_grad), gradient, strict=True)
    )
    ours = {f"lm.{name}": p.grad for name, p in lab.theta.named_parameters()}
    assert set(ours) == set(theirs)
    largest = max(float(g.abs().max()) for g in ours.values() if g is not None)
    assert largest > 1e-3
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], atol=1e-5 * max(1.0, largest), rtol=1e-4, msg=name)


def test_a_run_repeats_itself_and_the_conditions_differ() -> None:
    one, two = train(small()), train(small())
    assert one.rows == two.rows
    assert all(torch.equal(one.weights[3][n], two.weights[3][n]) for n in one.weights[3])
    assert set(one.weights) == {1, 3}
    for row in one.rows:
        assert row["disc/abs_mean"] < 1e-5  # exact numerics
        assert row["split/error"] < 1e-5
    assert one.rows[0]["lag/ess_tok"] == 1
    assert one.rows[2]["lag/ess_tok"] < 1
    other_seed = train(small(seed=1))
    assert other_seed.rows[0]["reward/mean"] != one.rows[0]["reward/mean"]
    for condition in (Condition(weights="int8"), Condition(noise=0.02)):
        assert train(small(condition=condition)).rows[0]["disc/abs_mean"] > 1e-4


def test_the_policy_itself_is_evaluated() -> None:
    rows = train(small(steps=2, evaluate_every=2)).rows
    assert "own/reward" not in rows[0]
    assert 0 <= rows[1]["own/reward"] <= 1
    assert 0 < rows[1]["own/length"] <= SMALL.length + 2


def test_the_products_policy_resyncs() -> None:
    result = train(small(steps=4, sync=NEVER | {"max_age": 2}))
    assert result.resyncs == [(1, "age")]
    assert [row["lag/age"] for row in result.rows] == [0, 1, 0, 1]
    assert result.rows[2]["lag/ess_seq"] == 1


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    specs = [small(seed=seed, steps=1, marks=(1,)) for seed in range(2)]
    (tmp_path / "runs").mkdir()
    execute(tmp_path, specs[0])
    stamp = path_of(tmp_path, specs[0]).stat().st_mtime_ns
    assert execute_all(tmp_path, specs, jobs=2) == 1
    assert path_of(tmp_path, specs[0]).stat().st_mtime_ns == stamp
    assert execute_all(tmp_path, specs, jobs=2) == 0
    assert load(tmp_path, specs[1]).rows == train(specs[1]).rows


def test_the_command_lists_and_refuses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    app(["lab", "list"], standalone_mode=False)
    assert "departure (quick):" in capfd.readouterr().out
    for args, words in (
        (["run", "nonsense"], "no experiment nonsense"),
        (["report", str(tmp_path)], "no verdict"),
    ):
        with pytest.raises((SystemExit, UsageError)) as error:
            app(["lab", *args])
        assert words in capfd.readouterr().err + str(error.value)
        assert (error.value.code if isinstance(error.value, SystemExit) else error.value.exit_code) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_experiment_from_the_command_to_the_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "leeway_host", "lab", "run", "decomposition", "--seeds", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stderr
    verdict = json.loads((tmp_path / "verdicts" / "decomposition.json").read_text())
    assert verdict["numbers"]["largest_error"] < 1e-5
    assert "The error splits" in (tmp_path / "report.html").read_text()
