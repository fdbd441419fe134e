"""The section `trainer`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from leeway.config.base import Dtype, Section
from leeway.config.deepspeed import check_deepspeed

Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainerConfig(Section):
    """The DeepSpeed trainer."""

    steps: int = Field(default=20, ge=1)
    """Number of optimiser steps of the run."""
    ranks: int = Field(default=1, ge=1)
    """Number of trainer processes on this machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU."""
    dtype: Dtype = "bfloat16"
    """Compute type; master weights and optimiser are float32."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage of DeepSpeed."""
    learning_rate: float = Field(default=1e-5, gt=0)
    lr_schedule: Literal["constant", "linear"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum norm of the gradient; larger gradients are scaled down."""
    micro_batch_tokens: int = Field(default=4096, ge=16)
    """Maximum number of tokens in one forward and backward pass. A prompt counts once for all its
    responses; for models that cannot share prompts, once per response, and padding counts."""
    logits_chunk_tokens: int = Field(default=128, ge=1)
    """Number of positions whose logits are in memory at the same time."""
    gradient_checkpointing: bool = False
    cpu_threads: int | None = Field(default=None, ge=1)
    """Threads of a CPU trainer; null: one per core."""
    checkpoint_every: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0: only after the last step."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of checkpoints that are kept."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Additional DeepSpeed configuration, merged over Leeway's. Keys that Leeway sets itself are rejected:
    batch sizes, the ZeRO stage, dtypes, optimiser, schedule and clipping (docs/run.md lists them)."""
    max_restarts: int = Field(default=0, ge=0)
    """Number of times the local launcher restarts a crashed trainer from the last checkpoint."""

    @field_validator("deepspeed")
    @classmethod
    def _leaves_our_keys_alone(cls, value: dict[str, Any]) -> dict[str, Any]:
        problems = check_deepspeed(value)
        if problems:
            raise ValueError("; ".join(problems))
        return value
