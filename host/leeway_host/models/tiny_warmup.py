"""Supervised warm-up of the tiny model."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from leeway.config import TaskConfig
from leeway.models.base import ModelError
from leeway_host.models.base import Progress

if TYPE_CHECKING:
    import torch

    from leeway_host.models.tiny import TinyParams

HELD_OUT = 256
"""Items for measuring accuracy, excluded from training if the task has at least twice as many."""
EVAL_EVERY = 10
IGNORE = -100

Example = tuple[list[int], list[int]]


def warm_up(
    model: Any, tokenizer: Any, task: TaskConfig, params: TinyParams, seed: int, progress: Progress
) -> dict[str, Any]:
    """Train `model` in place on answers of `task` until `params.target_accuracy`; returns steps and accuracy.

    Deterministic in (params, task, seed) for a given version of torch: it runs on one thread, which is as
    fast as two for a model of this size.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _warm_up(model, tokenizer, _Examples(tokenizer, task, model, seed), params, progress)
    finally:
        torch.set_num_threads(threads)


def _warm_up(
    model: Any, tokenizer: Any, examples: _Examples, params: TinyParams, progress: Progress
) -> dict[str, Any]:
    import torch

    pad_id = tokenizer.pad_token_id
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=params.warmup_lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    accuracy, step = measure_accuracy(model, examples.held_out, pad_id), 0
    while step < params.warmup_steps and accuracy < params.target_accuracy:
        optimiser.param_groups[0]["lr"] = params.warmup_lr * min(1.0, (step + 1) / 50)
        _train_step(model, optimiser, examples.draw(params.warmup_batch), pad_id)
        step += 1
        if step % EVAL_EVERY == 0:
            accuracy = measure_accuracy(model, examples.held_out, pad_id)
        if step % (10 * EVAL_EVERY) == 0:
            progress(f"tiny: step {step}, exact answers {accuracy:.0%} of {params.target_accuracy:.0%}")
    progress(f"tiny: ready after {step} supervised steps, {accuracy:.0%} exact answers")
    return {"warmup_steps": step, "accuracy": round(accuracy, 4)}


class _Examples:
    """Prompts and answers of a task as token ids; a few are held out, the others are drawn uniformly."""

    def __init__(self, tokenizer: Any, config: TaskConfig, model: Any, seed: int) -> None:
        from leeway.tasks import load_task

        self._tokenizer = tokenizer
        self._config = config
        self._max_length = model.config.max_position_embeddings
        self._task = load_task(config)
        self._rng = random.Random(f"leeway-warmup:{seed}")
        self._encoded: dict[int, Example] = {}
        size = len(self._task)
        held_out = self._rng.sample(range(size), min(HELD_OUT, size))
        self._excluded = frozenset(held_out) if size >= 2 * HELD_OUT else frozenset()
        self.held_out = [self._encode(index) for index in held_out]

    def draw(self, count: int) -> list[Example]:
        """`count` examples that are not held out, with replacement."""
        examples: list[Example] = []
        while len(examples) < count:
            index = self._rng.randrange(len(self._task))
            if index not in self._excluded:
                examples.append(self._encode(index))
        return examples

    def _encode(self, index: int) -> Example:
        if index not in self._encoded:
            self._encoded[index] = self._encode_new(index)
        return self._encoded[index]

    def _encode_new(self, index: int) -> Example:
        from leeway.tasks import encode_prompt

        item = self._task.item(index)
        prompt = encode_prompt(self._tokenizer, item, self._config)
        answer = [*self._tokenizer.encode(item.answer), self._tokenizer.eos_token_id]
        if len(prompt) + len(answer) > self._max_length:
            raise ModelError(
                f"model tiny: item {index} of task {self._task.name} needs {len(prompt) + len(answer)} "
                f"tokens, more than model.max_length={self._max_length}"
            )
        return prompt, answer


def _pad(batch: list[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask and labels (answers only), each [B, T]."""
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids = torch.full((len(batch), width), pad_id)
    labels = torch.full((len(batch), width), IGNORE)
    mask = torch.zeros((len(batch), width), dtype=torch.long)
    for row, (prompt, answer) in enumerate(batch):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
        mask[row, :end] = 1
    return ids, mask, labels


def _train_step(model: Any, optimiser: Any, batch: list[Example], pad_id: int) -> None:
    import torch

    ids, mask, labels = _pad(batch, pad_id)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE
    )
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def measure_accuracy(model: Any, examples: list[Example], pad_id: int) -> float:
    """Mean probability of the exact answer (and its end) at temperature 1.

    This is the expected accuracy of sampled answers, without the noise of sampling.
    """
    import torch

    ids, mask, labels = _pad(examples, pad_id)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    targets = labels[:, 1:]
    wanted = targets != IGNORE
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(wanted, logprobs, 0.0).sum(-1).exp().mean().item()
