"""What the trainer's tests and their worker processes share: a tiny model, made-up rollouts, small
configurations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from leeway.config import RunConfig
from leeway.messages import Rollout, RolloutHeader
from leeway_trainer.batch import MicroBatch, rank_micro_batches

VOCABULARY = 64


def save_tiny_model(directory: Path, seed: int = 0, tied: bool = True) -> Path:
    """Write a random Qwen3 (4 layers would be too slow here: 2) in Hugging Face format."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=1,
        pad_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(directory)
    return directory


def run_config(model: Path | str, **sections: dict[str, Any]) -> RunConfig:
    """A small float32 configuration; sections given are laid over it."""
    data: dict[str, Any] = {
        "model": {"name": str(model), "max_length": 64},
        "task": {"kind": "digits"},
        "sampling": {"max_new_tokens": 12, "head_tokens": 8},
        "batch": {"prompts": 2, "group_size": 3},
        "sync": {"verdict_timeout_s": 0.3, "stall_timeout_s": 20.0},
        "trainer": {
            "device": "cpu",
            "dtype": "float32",
            "learning_rate": 1e-2,
            "micro_batch_tokens": 48,
            "logits_chunk_tokens": 5,
            "steps": 3,
        },
    }
    for name, values in sections.items():
        data[name] = data.get(name, {}) | values
    return RunConfig.model_validate(data)


def make_rollout(
    batch: int = 0,
    group: int = 0,
    index: int = 0,
    *,
    epoch: int = 0,
    version: int = 0,
    seed: int = 0,
    reward: float | None = None,
    head: int = 8,
    complete: bool = False,
    config: str = "",
) -> Rollout:
    """A made-up rollout: random ids and lengths, log-probabilities of some distribution."""
    rng = np.random.default_rng([seed, batch, group, index])
    tokens = int(rng.integers(2, 12))
    response = rng.integers(2, VOCABULARY, tokens).astype(np.int32)
    heads = [rng.permutation(np.setdiff1d(np.arange(VOCABULARY), [token]))[: head - 1] for token in response]
    ids = np.concatenate([np.r_[token, rest] for token, rest in zip(response, heads, strict=True)]).astype(
        np.int32
    )
    mass = rng.dirichlet(np.ones(head), size=tokens) * (1.0 if complete else 0.95)
    logp = np.log(mass).astype(np.float32).reshape(tokens, head)
    return Rollout(
        header=RolloutHeader(
            ticket_id=f"b{batch}-g{group}-i{index}-v{version}",
            epoch=epoch,
            version=version,
            batch=batch,
            group=group,
            index=index,
            item=group,
            config=config,
            sampler="s0",
            finish_reason="stop",
            reward=float(rng.random() > 0.5) if reward is None else reward,
            spans=[(0, tokens, version)],
            support_complete=complete,
        ),
        prompt_ids=np.random.default_rng([seed, batch, group]).integers(2, VOCABULARY, 5).astype(np.int32),
        response_ids=response,
        logp=logp[:, 0].copy(),
        head_offsets=np.arange(0, tokens * head + 1, head).astype(np.int32),
        head_ids=ids,
        head_logp=logp.reshape(-1),
    )


def make_batch(batch: int = 0, groups: int = 2, group_size: int = 3, **options: Any) -> list[Rollout]:
    """All rollouts of a batch, in slot order."""
    return [make_rollout(batch, g, i, **options) for g in range(groups) for i in range(group_size)]


def micro_batches(
    rollouts: list[Rollout], budget: int = 48, rank: int = 0, size: int = 1, packed: bool = True
) -> list[MicroBatch]:
    """This rank's micro-batches."""
    return rank_micro_batches(
        rollouts,
        budget_tokens=budget,
        temperature=1.0,
        vocabulary=VOCABULARY,
        packed=packed,
        rank=rank,
        ranks=size,
    )


def short_run(**over: Any) -> dict[str, Any]:
    """Settings of `trainer` for five bfloat16 steps on the CPU."""
    return {
        "dtype": "bfloat16",
        "device": "cpu",
        "learning_rate": 1e-3,
        "steps": 5,
        "checkpoint_every": 2,
    } | over
