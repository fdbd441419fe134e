"""The policy pi_theta in a DeepSpeed engine: forward, backward over micro-batches, one optimiser step."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from leeway.config import TrainerConfig
from leeway.errors import UsageError
from leeway_trainer.errors import NonFiniteError
from leeway_trainer.ranks import Ranks

if TYPE_CHECKING:
    from leeway_trainer.batch import MicroBatch
    from leeway_trainer.head import TailQuery
    from leeway_trainer.model import PolicyModel, PolicyOutput

ADAM_EPS = 1e-8
LM_PREFIX = "lm."
"""Prefix of the Hugging Face model in `PolicyModel`; on the wire, tensors have their Hugging Face names."""


@dataclass(frozen=True)
class StepResult:
    """One optimiser step. grad_norm: global L2 norm before clipping."""

    grad_norm: float
    learning_rate: float


def learning_rate(step: int, config: TrainerConfig) -> float:
    """Learning rate of optimiser step `step` (from 0): linear warm-up, then constant or linear to 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.learning_rate
    left = config.steps - step
    return config.learning_rate * max(0.0, left / max(1, config.steps - config.warmup_steps))


MAX_BUCKET = 500_000_000
"""Parameters in a bucket of gradients: DeepSpeed's default, which it allocates whatever the model's size."""


def deepspeed_config(
    config: TrainerConfig, world_size: int, *, parameters: int = MAX_BUCKET, optimizer: bool = True
) -> dict[str, Any]:
    """DeepSpeed's configuration; `trainer.deepspeed` is merged over it. `parameters`: of the model.

    The policy sets the accumulation boundary of every micro-batch itself, because their number depends on the
    response lengths. Gradients accumulate in float32. DeepSpeed's stage 0 cannot do that with bfloat16
    weights, so stage 1 replaces it: the same numbers, with the optimiser state sharded over the ranks.
    """
    stage = max(1, config.zero_stage) if config.dtype == "bfloat16" else config.zero_stage
    built: dict[str, Any] = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": max(1, min(MAX_BUCKET, parameters))},
    }
    if optimizer:
        built["gradient_clipping"] = config.max_grad_norm
        built["data_types"] = {"grad_accum_dtype": "fp32"}
        built["optimizer"] = {
            "type": "AdamW",
            "params": {
                "lr": config.learning_rate,
                "betas": list(config.betas),
                "eps": ADAM_EPS,
                "weight_decay": config.weight_decay,
                "torch_adam": True,
            },
        }
    return merged(built, config.deepspeed)


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` updated with `over`, section by section; neither argument is changed."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def gathered(
    params: list[nn.Parameter], zero_stage: int, *, write: bool = False
) -> AbstractContextManager[Any]:
    """Inside, every rank holds the complete parameters; with `write`, what rank 0 writes to them is kept."""
    if zero_stage < 3:
        return nullcontext()
    import deepspeed

    whole: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        params, modifier_rank=0 if write else None
    )
    return whole


def start_engine(settings: TrainerConfig, **arguments: Any) -> tuple[Any, Any]:
    """DeepSpeed's (engine, optimizer). Raises UsageError when it rejects `trainer.deepspeed`."""
    import deepspeed

    # It prints memory figures, and collects garbage before each of them. Without what is there already, a
    # collection takes milliseconds instead of half a second.
    gc.freeze()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            engine, optimizer, *_ = deepspeed.initialize(**arguments)
    except Exception as exc:  # it raises AssertionError, ValueError, KeyError ...
        if not settings.deepspeed:
            raise
        raise UsageError(
            f"trainer.deepspeed: DeepSpeed cannot start with {json.dumps(settings.deepspeed)}: "
            f"{type(exc).__name__}: {exc}"
        ) from exc
    finally:
        gc.unfreeze()
    return engine, optimizer


class Policy:
    """The trained weights theta.

    for each micro-batch:  logp, head_logp = forward(batch, last=...) ;  backward(loss)
    then once:             step(k)
    """

    def __init__(self, model: PolicyModel, config: TrainerConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        if config.gradient_checkpointing:
            model.lm.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # needed for gradient checkpointing; dropout is off
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        self.engine, self.optimizer = start_engine(
            config,
            model=model,
            model_parameters=_parameter_groups(model, config.weight_decay),
            config=deepspeed_config(config, ranks.size, parameters=parameters),
        )
        self.model = model
        self.vocabulary = int(model.lm.config.get_text_config().vocab_size)
        self._bad_loss: float | None = None

    def forward(self, batch: MicroBatch, *, last: bool, tail: TailQuery | None = None) -> PolicyOutput:
        """log pi_theta, float32, with gradient.

        `last` marks the last micro-batch of the step; every rank runs the same number of micro-batches.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        output: PolicyOutput = self.engine(batch, tail)
        return output

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> PolicyOutput:
        """As `forward`, without gradient."""
        output: PolicyOutput = self.engine(batch)
        return output

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch's part of the loss.

        The loss of the step is the SUM over all micro-batches of all ranks: normalise by global counts.
        """
        value = float(loss.detach())
        if not math.isfinite(value):
            self._bad_loss = value
        self.engine.backward(loss * self.ranks.size)  # DeepSpeed averages over the ranks

    def step(self, step: int, lr_scale: float = 1.0) -> StepResult:
        """Clip the accumulated gradient and update theta. Raises NonFiniteError on all ranks.

        `lr_scale`: factor on the learning rate of this step alone.
        """
        if self.ranks.any(self._bad_loss is not None):
            raise NonFiniteError(step, "loss", self._bad_loss if self._bad_loss is not None else math.nan)
        rate = learning_rate(step, self.config) * lr_scale
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        plain = None if hasattr(self.optimizer, "_global_grad_norm") else self._plain_grad_norm()
        if plain is not None and not math.isfinite(plain):
            raise NonFiniteError(step, "grad_norm", plain)
        self.engine.step()
        norm = plain if plain is not None else float(self.engine.get_global_grad_norm())
        if not math.isfinite(norm):
            raise NonFiniteError(step, "grad_norm", norm)
        return StepResult(grad_norm=norm, learning_rate=rate)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the Hugging Face model, parameter) in model order, tied parameters once."""
        for name, param in self.model.named_parameters():
            if name.startswith(LM_PREFIX):
                yield name.removeprefix(LM_PREFIX), param

    def _plain_grad_norm(self) -> float:
        # Stage 0 in float32 uses torch's optimiser, which does not report the norm.
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    # No weight decay on norms and biases.
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
