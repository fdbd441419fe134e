"""The section `sampler`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from leeway.config.base import Dtype, Section


class SamplerConfig(Section):
    """The sampler processes and their vLLM engine."""

    replicas: int = Field(default=1, ge=1)
    """Number of sampler processes."""
    dtype: Dtype = "bfloat16"
    """Type of the weights in vLLM."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Maximum number of responses in flight in one engine."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs per engine."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU memory that vLLM may use."""
    cpu_kv_cache_gib: int = Field(default=1, ge=1)
    """Size of the KV cache of a CPU engine."""
    cpu_threads: int | None = Field(default=None, ge=1)
    """Threads of a CPU engine; null: the cores are divided among the processes of the run."""
    enforce_eager: bool | None = None
    """Run vLLM without CUDA graphs; null: true on CPU, false on GPU."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments for vLLM's AsyncEngineArgs, for example quantization."""
    http_host: str = "127.0.0.1"
    """Address that /healthz and /readyz listen on."""
    http_port: int = Field(default=0, ge=0, le=65535)
    """Port of /healthz and /readyz of the first sampler; further samplers use the next ports. 0: none."""
    drain_s: float = Field(default=20.0, gt=0)
    """On SIGTERM, time to finish the responses in flight. What is not finished by then is drawn again by
    other samplers, which favours short responses: set it above the time of the longest response."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """How long a sampler may take to start, and to draw its first token ever."""
    stall_timeout_s: float = Field(default=120.0, gt=0)
    """A sampler whose engine has responses in flight and draws no token for this long ends: its engine
    hangs. More than the longest prefill or compilation after the first token, and with the time of a restart
    less than `sync.stall_timeout_s`."""
    max_restarts: int = Field(default=3, ge=0)
    """Number of times the local launcher restarts a sampler before the run fails."""
    max_deliveries: int = Field(default=3, ge=2)
    """A ticket that all but one of this many samplers lost, dead or silent, is generated alone; if that
    sampler dies too, the run ends with an error that names the ticket. A sampler that is stopped or cut off
    ends nothing."""
