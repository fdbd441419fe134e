"""Which keys of a DeepSpeed configuration belong to Leeway. Files pasted from other projects contain them.

DeepSpeed would apply them without a word: `gradient_accumulation_steps: 4` divides every gradient by four,
because the trainer decides itself when a step is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BATCH = "batch.prompts, batch.group_size and trainer.micro_batch_tokens"

OWNED: dict[str, str] = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": BATCH,
    "elasticity": BATCH,
    "zero_optimization.stage": "trainer.zero_stage",
    "bf16": "trainer.dtype",
    "bfloat16": "trainer.dtype",
    "fp16": "trainer.dtype",
    "amp": "trainer.dtype",
    "torch_autocast": "trainer.dtype",
    "data_types": "trainer.dtype (gradients always accumulate in float32)",
    "optimizer.type": "no key: the optimiser is AdamW",
    "optimizer.params.lr": "trainer.learning_rate",
    "optimizer.params.betas": "trainer.betas",
    "optimizer.params.weight_decay": "trainer.weight_decay",
    "optimizer.params.adam_w_mode": "no key: the optimiser is AdamW",
    "scheduler": "trainer.lr_schedule and trainer.warmup_steps",
    "gradient_clipping": "trainer.max_grad_norm",
}
"""Key of DeepSpeed, dotted -> the keys of Leeway that decide it."""

UNSUPPORTED: dict[str, str] = {
    "compression_training": "it changes the weights that are published",
    "curriculum_learning": "it changes the batches",
    "data_efficiency": "it changes the batches",
    "pipeline": "the model is not split into pipeline stages",
    "progressive_layer_drop": "the policy that is trained would not be the one that is scored",
    "sparse_attention": "the policy would differ from the one that samplers run",
    "tensor_parallel": "weights are read as whole tensors",
}
"""Top-level key of DeepSpeed -> why the trainer cannot run with it."""


def check_deepspeed(settings: Mapping[str, Any]) -> list[str]:
    """One problem per key of `trainer.deepspeed` that Leeway owns or cannot run with; none for a good one."""
    problems = [
        f"{key} = {value!r} is set by Leeway: remove it, and use {OWNED[key]}"
        for key, value in _owned(settings, "")
    ]
    problems += [f"{key} is not supported: {UNSUPPORTED[key]}" for key in settings if str(key) in UNSUPPORTED]
    return problems


def _owned(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if key in OWNED:
            yield key, value
        elif isinstance(value, Mapping):
            yield from _owned(value, f"{key}.")
