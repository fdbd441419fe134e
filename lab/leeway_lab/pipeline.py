"""A run of the lab by the product itself: RunSpec -> `leeway run` (vLLM, DeepSpeed, Redis) -> RunResult.

build_config   the run as `leeway run` is told it (pure)
run_pipeline   a separate process, with its log next to its output directory
read_result    metrics.jsonl and the weights at the marks, in the lab's terms

Model, task, order of the prompts and optimiser are the lab's; numbers are float32 from end to end, unless
the sampler's condition is bfloat16. What remains different is what the product does: an engine with kernels
and its own generators, heads instead of whole distributions, weights and rollouts through Redis.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from leeway.config import RunConfig, SyncConfig
from leeway.config.load import build_config as validated
from leeway.config.load import dump_config
from leeway.errors import LeewayError, StalledError, UsageError
from leeway.metrics.areas.lag import LAG_VAR
from leeway.metrics.areas.resync import SYNC_REASON, WEIGHTS_VERSION
from leeway.process import die_with_parent
from leeway_host.launch.record import Row, read_rows
from leeway_lab.model import MAX_LENGTH, base_directory, task_config
from leeway_lab.spec import RunSpec
from leeway_lab.train import RunResult

HELD_OUT = 1024
"""Items at the end of the lab's data set that training does not use: KL is measured on their prompts."""
START_S, BUDGET_S, STOP_S = 3600.0, 7200.0, 60.0
"""For an engine's start and whatever else is waited for, for a whole run, and for its end after that: enough
on a machine that does other things too."""
SAMPLER_DTYPES = {"exact": "float32", "bf16": "bfloat16"}
NOT_KEPT = ("batches", "checkpoints", "model")


class PipelineFailed(LeewayError):
    """A run failed, or its output is not that of its specification."""


def build_config(spec: RunSpec, model: Path) -> RunConfig:
    """Configuration of `leeway run` on the weights in `model`. Raises UsageError for lab-only options."""
    condition = spec.condition
    lab_only = {
        f"condition.weights={condition.weights}": condition.weights not in SAMPLER_DTYPES,
        f"condition.noise={condition.noise}": condition.noise > 0,
        f"fault={spec.fault}": spec.fault != "none",
        f"optimizer={spec.optimizer}": spec.optimizer != "adamw",
        f"evaluate_every={spec.evaluate_every}": spec.evaluate_every > 0,
        "excess=true": spec.excess,
    }
    if refused := [name for name, wrong in lab_only.items() if wrong]:
        raise UsageError(f"engine=pipeline has no {', '.join(refused)}: only engine=lab does")
    task = task_config(spec.model)
    return validated(
        {
            "name": "lab",
            "seed": spec.seed,
            "model": {"name": str(model), "max_length": MAX_LENGTH},
            "task": {**task.model_dump(), "size": task.size - HELD_OUT},
            "sampling": {"max_new_tokens": spec.model.length + 2},
            "batch": {"prompts": spec.prompts, "group_size": spec.group_size, "order_seed": 0},
            "correction": spec.correction.model_dump(),
            "sync": _sync(spec.sync),
            "sampler": {
                "dtype": SAMPLER_DTYPES[condition.weights],
                "max_num_seqs": spec.prompts * spec.group_size,
                "cpu_threads": 1,
                "start_timeout_s": START_S,
            },
            "trainer": {
                "steps": spec.steps,
                "dtype": "float32",
                "learning_rate": spec.learning_rate,
                "warmup_steps": spec.warmup,
                "max_grad_norm": 1e9,  # the lab does not clip
                "micro_batch_tokens": 8192,
                "checkpoint_every": 0,
                "cpu_threads": 1,  # more do not make so small a model faster
            },
            "weights": {"dtype": "float32"},
            "checks": {"probe_draws": 0, "self_prefix_responses": 0},  # measured by the lab itself
            # The policy before step m is the one after m steps; the one after the last is the run's model.
            "output": {"save_batches": [mark for mark in spec.marks if mark < spec.steps]},
        },
        "engine=pipeline",
    )


def _sync(sync: SyncConfig) -> dict[str, Any]:
    found = {**sync.model_dump(), "stall_timeout_s": START_S, "commit_timeout_s": START_S}
    if sync.max_age == 1:
        # On-policy is synchronous: what is drawn ahead of a resync that is sure to come would be voided.
        found["max_lead"] = 0
    return found


def run_pipeline(spec: RunSpec, directory: Path) -> RunResult:
    """Run `spec` in `directory` from the beginning; the log `directory`.log is kept.

    Raises PipelineFailed, or StalledError when it takes longer than BUDGET_S.
    """
    config = build_config(spec, base_directory(spec.model))
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    file, log = directory / "given.yaml", directory.with_suffix(".log")
    file.write_text(dump_config(config))
    command = [sys.executable, "-m", "leeway_host", "run", str(file), "--out", str(directory)]
    code = _finished(command, log)
    if code != 0:
        raise PipelineFailed(f"leeway run ended with exit status {code}; {log} ends with:\n{_tail(log)}")
    result = read_result(directory, spec)
    for name in NOT_KEPT:
        shutil.rmtree(directory / name, ignore_errors=True)
    return result


def _finished(command: list[str], log: Path) -> int:
    """Exit status of `command`; its output goes to `log`."""
    environ = {k: v for k, v in os.environ.items() if k == "LEEWAY_CACHE_DIR" or not k.startswith("LEEWAY_")}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environ,
            preexec_fn=die_with_parent,
        )
        try:
            return process.wait(BUDGET_S)
        except subprocess.TimeoutExpired:
            raise StalledError(f"leeway run took longer than {BUDGET_S:g} s; see {log}") from None
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def read_result(directory: Path, spec: RunSpec) -> RunResult:
    """The result of the run in `directory`. Raises PipelineFailed unless it is a complete run of `spec`."""
    rows = read_rows(directory / "metrics.jsonl")
    steps, epochs = [row["step"] for row in rows], {row["epoch"] for row in rows}
    if steps != list(range(spec.steps)) or len(epochs) != 1:
        raise PipelineFailed(
            f"{directory}/metrics.jsonl has steps {steps} of {len(epochs)} run epochs, expected 0 to "
            f"{spec.steps - 1} of one"
        )
    return RunResult(
        rows=[_numbers(row) for row in rows],
        # Of what happened, not of what was decided: a version may fail to be published.
        resyncs=[
            (int(row["step"]), str(row.get(SYNC_REASON) or "unknown"))
            for row, after in pairwise(rows)
            if after[WEIGHTS_VERSION] > row[WEIGHTS_VERSION]
        ],
        weights={mark: _weights(directory, mark, spec) for mark in spec.marks if mark <= spec.steps},
    )


def _numbers(row: Row) -> dict[str, float]:
    numbers = {name: float(v) for name, v in row.items() if isinstance(v, int | float)}
    return {**numbers, "lag/sd": math.sqrt(numbers[LAG_VAR])}


def _weights(directory: Path, mark: int, spec: RunSpec) -> dict[str, Tensor]:
    """theta after `mark` steps, float32, by the lab's names: the tied output layer is left out."""
    from safetensors.torch import load_file

    final = mark == spec.steps
    place = directory / "model" if final else directory / "batches" / f"step-{mark:04d}" / "theta"
    files = sorted(place.glob("*.safetensors"))
    if not files:
        raise PipelineFailed(f"{place} holds no weights, expected those after {mark} steps")
    found: dict[str, Any] = {}
    for file in files:
        found |= load_file(file)
    found.pop("lm_head.weight", None)
    narrow = {name: str(tensor.dtype) for name, tensor in found.items() if tensor.element_size() != 4}
    if narrow:
        raise PipelineFailed(f"{place}: expected float32 weights, got {narrow}")
    return found
