"""What is asked of vLLM, without starting it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from leeway.config import RunConfig
from leeway.errors import UsageError
from leeway_sampler.arguments import banning_settings, engine_args, engine_environment, sampling_arguments
from leeway_sampler.generation import Head


def config(**sections) -> RunConfig:
    return RunConfig.model_validate({"task": {"kind": "digits"}, **sections})


def test_processed_logprobs_are_always_requested():
    args = engine_args(config(), "dir", cpu=True, head=64)
    assert args["logprobs_mode"] == "processed_logprobs"
    assert args["enforce_eager"]
    assert "gpu_memory_utilization" not in args
    assert not engine_args(config(), "dir", cpu=False, head=64)["enforce_eager"]


@pytest.mark.parametrize("name", ["logprobs_mode", "speculative_config", "model"])
def test_arguments_that_would_change_the_distribution_are_rejected(name):
    with pytest.raises(UsageError, match=name):
        engine_args(config(sampler={"engine_args": {name: "x"}}), "dir", cpu=True, head=64)


def test_other_engine_arguments_are_passed_on():
    args = engine_args(config(sampler={"engine_args": {"swap_space": 1}}), "dir", cpu=True, head=64)
    assert args["swap_space"] == 1


def test_sampling_never_bans_the_end():
    sampling = config(sampling={"top_k": 20, "top_p": 0.9}).sampling
    arguments = sampling_arguments(sampling, Head(64, 1e-3, True, 1000), seed=5, max_new_tokens=9)
    assert not {"min_tokens", "ignore_eos"} & set(arguments)
    assert (arguments["logprobs"], arguments["seed"], arguments["max_tokens"]) == (96, 5, 9)


def test_the_users_environment_is_kept():
    environment = engine_environment(config(), {"OMP_NUM_THREADS": "7"})
    assert "OMP_NUM_THREADS" not in environment
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert engine_environment(config(sampler={"cpu_threads": 3}), {})["OMP_NUM_THREADS"] == "3"


def test_vllm_reads_every_variable_that_is_set_for_it():
    from vllm import envs

    names = [name for name in engine_environment(config(), {}) if name.startswith("VLLM_")]
    assert names and set(names) <= set(envs.environment_variables)


def test_one_process_runs_the_model_on_the_cpu_unless_it_is_split(monkeypatch):
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    monkeypatch.setattr("leeway_sampler.arguments._has_accelerator", lambda: False)
    assert engine_environment(config(), {})[name] == "0"
    assert name not in engine_environment(config(sampler={"tensor_parallel_size": 2}), {})
    monkeypatch.setattr("leeway_sampler.arguments._has_accelerator", lambda: True)
    assert name not in engine_environment(config(), {})


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from leeway_sampler.__main__ import parse_args\n"
        "try: parse_args(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'redis', 'pydantic'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_settings_that_ban_tokens_are_named():
    harmless = {"min_tokens": 0, "bad_words": [], "logit_bias": {}, "temperature": 0.7}
    assert banning_settings(SimpleNamespace(**harmless)) == []
    params = SimpleNamespace(ignore_eos=True, repetition_penalty=1.1, bad_words=["no"])
    assert banning_settings(params) == ["ignore_eos=True", "bad_words=['no']", "repetition_penalty=1.1"]
