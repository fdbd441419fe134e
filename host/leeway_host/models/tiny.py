"""A small Qwen3-architecture model with a character tokenizer, built from scratch in less than a minute.

It is large enough to learn the built-in digits task, and small enough that a run through every part of the
system takes a minute or two on two cores. Supervised steps on the task's items (`tiny_warmup.py`) bring it to
`target_accuracy`, from which reinforcement learning starts.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leeway.config import ModelConfig, TaskConfig
from leeway.models.base import ModelError
from leeway_host.models.base import (
    Progress,
    is_model_dir,
    publish_dir,
    quiet_libraries,
    write_provenance,
)

FORMAT = 1
"""Part of the cache key; incremented when the same parameters give another model."""

SCORING_KEYS = {
    "reward",
    "reward_timeout_s",
    "reward_memory_mib",
    "reward_workers",
    "reward_env",
    "error_reward",
}
"""Settings of a task that its items do not depend on."""

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]


class TinyParams(BaseModel):
    """`model.params` of the model tiny."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden: int = Field(default=128, ge=32, le=1024, multiple_of=32)
    layers: int = Field(default=3, ge=1, le=16)
    heads: int = Field(default=4, ge=1, le=32)
    """Attention heads; half as many key-value heads if even."""
    vocab: int = Field(default=128, ge=len(CHARACTERS) + 3, le=4096)
    """Size of the vocabulary; ids beyond the characters are unused."""
    target_accuracy: float = Field(default=0.5, gt=0, le=1)
    """The warm-up ends when this share of answers sampled at temperature 1 is exactly right."""
    warmup_steps: int = Field(default=3000, ge=0)
    """Maximum number of supervised steps; 0 keeps the random model."""
    warmup_batch: int = Field(default=128, ge=1)
    warmup_lr: float = Field(default=1e-3, gt=0)


def prepare_tiny(config: ModelConfig, task: TaskConfig, seed: int, cache: Path, progress: Progress) -> Path:
    """Directory of the warmed-up model, built on first use for these parameters, this task and this seed."""
    try:
        params = TinyParams(**config.params)
    except ValidationError as error:
        problems = "; ".join(f"{e['loc'][0]}={e['input']!r}: {e['msg']}" for e in error.errors())
        raise ModelError(
            f"model.params of tiny: {problems}; known: {', '.join(TinyParams.model_fields)}"
        ) from error
    key = build_cache_key(params, task, seed, config.max_length)
    target = cache / f"tiny-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if is_model_dir(target):
        return target
    with publish_dir(target) as directory:
        _make(params, task, seed, config.max_length, directory, progress)
    return target


def build_cache_key(params: TinyParams, task: TaskConfig, seed: int, max_length: int) -> str:
    """Everything that weights and tokenizer depend on, as text."""
    items = task.model_dump(exclude=SCORING_KEYS)
    items["contents"] = [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in task.files if path.is_file()
    ]
    key = {
        "format": FORMAT,
        "params": params.model_dump(),
        "items": items,
        "seed": seed,
        "max_length": max_length,
    }
    return json.dumps(key, sort_keys=True)


def build_tokenizer(vocab: int) -> Any:
    """One token per character of printable ASCII and the line break; everything else is <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [PAD, EOS, UNK, *CHARACTERS]
    tokens += [f"<unused{i}>" for i in range(vocab - len(tokens))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )


def build_model(params: TinyParams, tokenizer: Any, max_length: int, seed: int) -> Any:
    """A random Qwen3ForCausalLM with tied embeddings, in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=params.vocab,
        hidden_size=params.hidden,
        intermediate_size=3 * params.hidden,
        num_hidden_layers=params.layers,
        num_attention_heads=params.heads,
        num_key_value_heads=params.heads // 2 if params.heads % 2 == 0 else params.heads,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def _make(
    params: TinyParams, task: TaskConfig, seed: int, max_length: int, directory: Path, progress: Progress
) -> None:
    import torch

    from leeway_host.models.tiny_warmup import warm_up

    with quiet_libraries():
        tokenizer = build_tokenizer(params.vocab)
        model = build_model(params, tokenizer, max_length, seed)
    size = sum(p.numel() for p in model.parameters())
    progress(f"tiny: {size / 1e6:.2f} M parameters, supervised warm-up on {task.kind}")
    record = warm_up(model, tokenizer, task, params, seed, progress)
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with quiet_libraries():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    write_provenance(directory, {"params": params.model_dump(), "parameters": size, "seed": seed, **record})
