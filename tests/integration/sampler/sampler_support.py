"""A random Qwen3 model with a character tokenizer, small enough to start vLLM on."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = string.digits + string.ascii_lowercase + string.ascii_uppercase + " +-*/=()<>,.;:?!"
EOS = "<eos>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<pad>", EOS, "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token="<pad>", unk_token="<unk>"
    )


def save_tiny_model(directory: Path, *, tied: bool, seed: int = 0) -> Any:
    """Write model and tokenizer to `directory`; returns the model in bfloat16."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def perturbed(base: dict[str, torch.Tensor], seed: int, scale: float = 0.05) -> dict[str, torch.Tensor]:
    """`base` with independent noise added to every weight."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in base.items()
    }


def reference_logp(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """log pi of the model over the vocabulary before each response token, f32 [T, V]; float32 head."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
        return (hidden.float() @ model.lm_head.weight.float().T).log_softmax(dim=-1)
