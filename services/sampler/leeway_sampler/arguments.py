"""What Leeway asks of vLLM: environment, engine arguments, sampling parameters. Without vLLM itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leeway.config import RunConfig, SamplingConfig
from leeway.errors import UsageError
from leeway.telemetry.tracing import TRACES_ENDPOINT, tracing
from leeway_sampler.generation import Head

RESERVED_ARGS = (
    "logprobs_mode",
    "weight_transfer_config",
    "speculative_config",
    "model",
    "logits_processors",
)
"""Engine arguments that users cannot set: with other values, the reported distribution would differ from the
one tokens are drawn from, or tokens of two weight versions could mix in one response."""

NEUTRAL: dict[str, Any] = {
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": None,
    "allowed_token_ids": None,
    "logit_bias": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "structured_outputs": None,
}
"""Fields of SamplingParams that ban or bias tokens, with the values that have no effect."""


def engine_environment(config: RunConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables to add to the environment for vLLM; those that the user has set are left alone.

    They must be in os.environ before torch is imported.
    """
    processes = config.sampler.replicas + config.trainer.ranks
    threads = config.sampler.cpu_threads or max(1, (os.cpu_count() or 1) // processes)
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": str(config.sampler.cpu_kv_cache_gib),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "DEBUG" if config.telemetry.log_level == "DEBUG" else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Otherwise all samplers on a machine bind to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }
    if not _has_accelerator():
        if config.sampler.enforce_eager is not False:
            # vLLM compiles two small functions of its sampler even in eager mode, which takes 20 s.
            wanted["TORCH_COMPILE_DISABLE"] = "1"
        if config.sampler.tensor_parallel_size == 1:
            # The model runs in the process of the engine's core. vLLM's CPU platform would start one more
            # process for it, to set thread counts, which are set here.
            wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {name: value for name, value in wanted.items() if name not in environ}


def _has_accelerator() -> bool:
    # Does not ask torch, because importing it fixes the thread counts that this environment sets.
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dri", "/dev/accel"))


def engine_args(config: RunConfig, model: str, *, cpu: bool, head: int) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs; `head`: top log-probabilities per token that requests may ask for.

    Raises UsageError when sampler.engine_args sets one of RESERVED_ARGS.
    """
    taken = sorted(set(config.sampler.engine_args) & set(RESERVED_ARGS))
    if taken:
        raise UsageError(f"sampler.engine_args: {', '.join(taken)} cannot be set: Leeway sets it itself")
    eager = config.sampler.enforce_eager
    args: dict[str, Any] = {
        "model": model,
        "dtype": config.sampler.dtype,
        "seed": config.seed,
        "max_model_len": config.model.max_length,
        "max_num_seqs": config.sampler.max_num_seqs,
        "max_logprobs": max(head, 1),
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "enforce_eager": cpu if eager is None else eager,
        "tensor_parallel_size": config.sampler.tensor_parallel_size,
        "trust_remote_code": config.model.trust_remote_code,
        "disable_log_stats": True,
    }
    if tracing():
        # vLLM builds its spans from its statistics.
        args |= {"otlp_traces_endpoint": os.environ[TRACES_ENDPOINT], "disable_log_stats": False}
    # In bfloat16, logits around 16 are rounded to steps of 0.125, and log-probabilities with them.
    overrides = {"head_dtype": "float32", **config.sampler.engine_args.get("hf_overrides", {})}
    if cpu:
        # When a prompt with a seed is split over two steps, vLLM rewinds the request's generator, which CPU
        # generators do not support: the engine crashes.
        args["enable_chunked_prefill"] = False
        args["max_num_batched_tokens"] = max(2048, config.model.max_length)
    else:
        args["gpu_memory_utilization"] = config.sampler.gpu_memory_utilization
    return args | config.sampler.engine_args | {"hf_overrides": overrides}


def sampling_arguments(
    sampling: SamplingConfig, head: Head, seed: int, max_new_tokens: int
) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams. Never min_tokens or ignore_eos, which ban the EOS token."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": seed,
        "max_tokens": max_new_tokens,
        "logprobs": head.requested,
        "flat_logprobs": True,
        "detokenize": False,
    }


def banning_settings(params: Any) -> list[str]:
    """`name=value` of each setting in vLLM's SamplingParams that bans or biases tokens.

    Such settings change the sampler's distribution in a way that the trainer does not model.
    """
    found = {name: getattr(params, name, neutral) for name, neutral in NEUTRAL.items()}
    return [f"{name}={v}" for name, v in found.items() if v != NEUTRAL[name] and v not in ([], {})]
