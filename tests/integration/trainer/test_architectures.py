"""Causal language models of other architectures: positions, packing, padding, scaled and capped logits."""

from __future__ import annotations

import pytest
import torch
from trainer_support import VOCABULARY, make_batch, micro_batches

from leeway.errors import UsageError
from leeway_trainer.model import load_policy_model

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.2,
}
OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "init_std": 0.2,
    "pad_token_id": 1,
}
MODELS = {
    "Llama": SMALL,
    "Qwen2": {**SMALL, "tie_word_embeddings": True},
    "Gemma2": {**SMALL, "final_logit_softcapping": 3.0, "sliding_window": 4},
    "Granite": {**SMALL, "logits_scaling": 4.0},
    "Cohere": {**SMALL, "logit_scale": 0.25},
    "GPT2": GPT2,
    "OPT": OPT,
}


def save(name: str, directory) -> None:
    import transformers

    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    torch.manual_seed(0)
    model_class(config_class(**MODELS[name])).float().save_pretrained(directory)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_equal_the_models_own(tmp_path, name, packed):
    save(name, tmp_path)
    model = load_policy_model(tmp_path, dtype=torch.float32, chunk_tokens=4).eval()
    rollouts = make_batch()
    assert model.shares_prompts
    batch = micro_batches(rollouts, budget=1000, packed=packed)[0]
    assert batch.input_ids.shape[0] == (1 if packed else len(rollouts)), "one micro-batch"
    logp, head = model(batch)[:2]
    (logp.sum() + head.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    for i, rollout in enumerate(rollouts):
        ids = torch.tensor([*rollout.prompt_ids, *rollout.response_ids]).long()[None]
        with torch.no_grad():
            dense = model.lm(ids).logits[0].float().log_softmax(-1)[rollout.prompt_ids.size - 1 : -1]
        want = dense.gather(1, torch.tensor(rollout.response_ids).long()[:, None])[:, 0]
        torch.testing.assert_close(logp[batch.sequence == i], want, atol=2e-5, rtol=0)


def test_unknown_transformation_of_logits_is_rejected(tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    save("Llama", tmp_path)
    original = LlamaForCausalLM.forward

    def doubled(self, *args, **options):
        out = original(self, *args, **options)
        out.logits = out.logits * 2
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    with pytest.raises(UsageError, match="transforms its logits in a way that the trainer does not support"):
        load_policy_model(tmp_path, dtype=torch.float32, chunk_tokens=4)


def test_a_directory_without_a_model_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="cannot load a causal language model from"):
        load_policy_model(tmp_path, dtype=torch.float32, chunk_tokens=4)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot load a causal language model from"):
        load_policy_model(tmp_path, dtype=torch.float32, chunk_tokens=4)


def test_damaged_weights_are_rejected(tmp_path):
    save("Llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UsageError, match="cannot load a causal language model from"):
        load_policy_model(tmp_path, dtype=torch.float32, chunk_tokens=4)
