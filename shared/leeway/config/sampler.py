"""The section `sampler`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from leeway.config.base import Dtype, Section


class SamplerConfig(Section):
    """The sampler processes and their vLLM engine."""

    replicas: int = Field(default=1, ge=1)
    dtype: Dtype = "bfloat16"
    max_num_seqs: int = Field(default=64, ge=1)
    """Responses in flight in one engine."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    cpu_kv_cache_gib: int = Field(default=1, ge=1)
    cpu_threads: int | None = Field(default=None, ge=1)
    """Threads of a CPU engine; null: the cores divided among the processes of the run."""
    enforce_eager: bool | None = None
    """null: true on CPU, false on GPU."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More arguments for vLLM's AsyncEngineArgs, for example quantization."""
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=0, ge=0, le=65535)
    """Port of /healthz and /readyz of the first sampler, the next ones count up; 0: none."""
    drain_s: float = Field(default=20.0, gt=0)
    """On SIGTERM, time to finish what is in flight before it is handed back."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of a sampler by the local launcher before the run fails."""
    max_deliveries: int = Field(default=3, ge=2)
    """A ticket that is handed out for this many times is drawn alone; when its sampler dies of it once more,
    the run ends and names it."""
