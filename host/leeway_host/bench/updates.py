"""Weights as an optimiser changes them: AdamW with float32 master weights, cast to the type on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leeway.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

BATCH, LENGTH = 4, 48


def trained_weights(
    directory: Path, steps: Sequence[int], learning_rate: float, dtype: str = "bfloat16"
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """(optimizer steps, weights in the type on the wire) for 0 and each of `steps`, which increase.

    AdamW with Leeway's betas, gradient norm 1, next-token loss on sums with their answers (reasoning-gym).
    Raises UsageError when the directory contains no causal language model with a tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(directory))
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {directory}: {error}") from error
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=False
    )
    batches = _batches(tokenizer, max(steps))

    def wire() -> dict[str, Tensor]:
        return {name: p.detach().to(getattr(torch, dtype), copy=True) for name, p in model.named_parameters()}

    yield 0, wire()
    for step, ids in enumerate(batches, start=1):
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in steps:
            yield step, wire()


def _batches(tokenizer: object, count: int) -> list[Tensor]:
    import reasoning_gym
    import torch

    items = reasoning_gym.create_dataset("chain_sum", size=count * BATCH * 8, seed=0)
    text = "\n".join(f"{item['question']} {item['answer']}" for item in items)
    ids = torch.tensor(tokenizer.encode(text)[: count * BATCH * LENGTH])  # type: ignore[attr-defined]
    return list(ids.reshape(count, BATCH, LENGTH))
