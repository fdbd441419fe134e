"""Two trainer ranks give what one gives: weights, metrics, and a whole run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from correction_steps import CASES, NAMES, assert_same, two_steps
from other_side import OtherSide
from trainer_support import run_config
from two_ranks_worker import Result, stage_steps

from leeway.config.load import dump_config
from leeway_trainer.ranks import Ranks

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BUDGET_S = 180
ENV = {
    **os.environ,
    "PYTHONPATH": f"{ROOT / 'shared'}:{ROOT / 'services/trainer'}:{HERE}",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--master-port",
    "0",
    "--rdzv-backend",
    "c10d",
]


def python(*args: object) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=BUDGET_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def on_two_ranks(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks wrote what they got, see two_ranks_worker.py."""
    out = tmp_path_factory.mktemp("two_ranks")
    python(*TORCHRUN, "--rdzv-endpoint", "localhost:0", HERE / "two_ranks_worker.py", tiny_dir, out)
    return out


@pytest.fixture(scope="module")
def on_one_rank(tiny_dir: Path, ranks: Ranks) -> Result:
    return stage_steps(tiny_dir, ranks, 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_zero_stage_gives_the_same(on_one_rank: Result, on_two_ranks: Path, stage: int) -> None:
    one, two = on_one_rank, torch.load(on_two_ranks / f"{stage}.pt", weights_only=True)
    for name, want in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], want, atol=1e-6, rtol=1e-6, msg=name)
    for step in ("metrics", "lagging"):
        for name, want in one[step].items():
            if not name.startswith("time/"):
                assert two[step][name] == pytest.approx(want, rel=1e-4, abs=1e-6), name
    assert two["metrics"]["lag/ess_tok"] == 1.0
    assert two["lagging"]["lag/ess_tok"] < 1.0


@pytest.mark.parametrize(("method", "settings"), CASES, ids=NAMES)
def test_every_correction_gives_the_same(
    tiny_dir: Path, ranks: Ranks, on_two_ranks: Path, method: str, settings: dict[str, object]
) -> None:
    two = torch.load(on_two_ranks / f"{NAMES[CASES.index((method, settings))]}.pt", weights_only=True)
    one = two_steps(tiny_dir, ranks, 4096, method, settings)[:2]
    assert_same(one, (two["weights"], two["metrics"]))


def test_a_run_on_two_ranks(tiny_dir, client, keys, redis_server, tmp_path):
    config = run_config(
        tiny_dir,
        trainer={"steps": 3, "ranks": 2, "zero_stage": 3, "dtype": "bfloat16", "checkpoint_every": 2},
        sync={"max_age": 1, "stall_timeout_s": 20.0},
    )
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    run = ["-m", "--", "leeway_trainer", "--config", path, "--run", keys.run, "--redis", redis_server.url]
    # Without "--" torchrun takes --run for an abbreviation of one of its own options.
    with OtherSide(client, keys, config) as other:
        python(*TORCHRUN, "--rdzv-endpoint", "localhost:0", *run, "--out", tmp_path / "run")
        other.wait_for(lambda: other.reports[-1].event == "finished")
    assert [m.version for m in other.manifests] == [0, 1, 2]
    assert [r.metrics["lag/ess_tok"] for r in other.steps()] == [1.0, 1.0, 1.0]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
