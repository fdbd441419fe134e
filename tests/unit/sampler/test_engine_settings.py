"""What is asked of vLLM, without starting it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from leeway.config import RunConfig
from leeway.errors import UsageError
from leeway_sampler.engine import SamplerEngine, engine_args, engine_environment, sampling_arguments
from leeway_sampler.generation import Head
from leeway_sampler.status import Counters
from leeway_sampler.watch import WeightWatcher


def config(**sections) -> RunConfig:
    return RunConfig.model_validate({"task": {"kind": "digits"}, **sections})


def test_processed_logprobs_are_always_asked_for():
    args = engine_args(config(), "dir", cpu=True, head=64)
    assert args["logprobs_mode"] == "processed_logprobs"
    assert args["enforce_eager"]
    assert "gpu_memory_utilization" not in args
    assert not engine_args(config(), "dir", cpu=False, head=64)["enforce_eager"]


@pytest.mark.parametrize("name", ["logprobs_mode", "speculative_config", "model"])
def test_arguments_that_would_bend_the_distribution_are_refused(name):
    with pytest.raises(UsageError, match=name):
        engine_args(config(sampler={"engine_args": {name: "x"}}), "dir", cpu=True, head=64)


def test_more_engine_arguments_pass():
    args = engine_args(config(sampler={"engine_args": {"swap_space": 1}}), "dir", cpu=True, head=64)
    assert args["swap_space"] == 1


def test_sampling_never_bans_the_end():
    sampling = config(sampling={"top_k": 20, "top_p": 0.9}).sampling
    arguments = sampling_arguments(sampling, Head(64, 1e-3, True, 1000), seed=5, max_new_tokens=9)
    assert not {"min_tokens", "ignore_eos"} & set(arguments)
    assert (arguments["logprobs"], arguments["seed"], arguments["max_tokens"]) == (96, 5, 9)


def test_the_users_environment_stays():
    environment = engine_environment(config(), {"OMP_NUM_THREADS": "7"})
    assert "OMP_NUM_THREADS" not in environment
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert engine_environment(config(sampler={"cpu_threads": 3}), {})["OMP_NUM_THREADS"] == "3"


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from leeway_sampler.__main__ import parse_args\n"
        "try: parse_args(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'redis', 'pydantic'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_counters_add_up():
    counters = Counters()
    with counters.working():
        counters.generated(10)
        counters.generated(4, void=True)
        assert counters.inflight == 1
    engine = SamplerEngine(None, None, None, None)  # type: ignore[arg-type]
    watcher = WeightWatcher(None, None, 1.0, None)  # type: ignore[arg-type]
    watcher.set_fence("0.1.5")
    status = counters.status("s", ready=True, engine=engine, watcher=watcher)
    assert (status.tokens, status.tokens_voided, status.inflight, status.version) == (14, 4, 0, -1)
    assert (status.epoch, status.fenced, status.passed, status.stuck) == (-1, True, "", None)
    assert 0 <= status.busy_s <= status.uptime_s
