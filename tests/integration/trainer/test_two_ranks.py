"""Two trainer ranks give what one gives: weights, metrics, and a whole run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from other_side import OtherSide
from trainer_support import run_config

from leeway.config.load import dump_config

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
def results(tiny_dir, tmp_path_factory) -> dict[int, dict[int, dict]]:
    """ranks -> stage -> what the worker wrote."""
    found = {}
    for size, launcher in ((1, []), (2, [*TORCHRUN, "--rdzv-endpoint", "localhost:0"])):
        out = tmp_path_factory.mktemp(f"ranks{size}")
        python(*launcher, HERE / "two_ranks_worker.py", tiny_dir, out, size)
        found[size] = {
            stage: torch.load(out / f"{stage}.pt", weights_only=True) for stage in range(4 if size > 1 else 1)
        }
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_same_weights_and_metrics(results, stage):
    one, two = results[1][0], results[2][stage]
    for name, want in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], want, atol=1e-6, rtol=1e-6, msg=name)
    for step in ("metrics", "lagging"):
        for name, want in one[step].items():
            if not name.startswith("time/"):
                assert two[step][name] == pytest.approx(want, rel=1e-4, abs=1e-6), name
    assert two["metrics"]["lag/ess_tok"] == 1.0
    assert two["lagging"]["lag/ess_tok"] < 1.0


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
