"""Packed rows with shared prompts give what padded batches give, and models that cannot share do not."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_architectures import SMALL
from trainer_support import VOCABULARY, make_batch, make_rollout, micro_batches

from leeway.messages import Rollout
from leeway_trainer import sharing
from leeway_trainer.batch import MicroBatch
from leeway_trainer.model import PolicyModel, load_policy_model

WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "Llama": {"num_key_value_heads": 4},  # as many heads for keys as for queries
    "Qwen3": {},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {**WINDOWED, "use_sliding_window": True},
    "Gemma2": WINDOWED,
    "Gemma3": {**WINDOWED, "query_pre_attn_scalar": 8},
    "MixtralMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def save(name: str, directory: Path, **over: object) -> Path:
    import transformers

    prefix = {"MixtralMoe": "Mixtral"}.get(name, name)
    config_class = getattr(transformers, f"{prefix}{'TextConfig' if name == 'Gemma3' else 'Config'}")
    torch.manual_seed(0)
    settings = {**SMALL, **MODELS.get(name, {}), **over}
    if settings["head_dim"] is None:  # FalconConfig derives it
        del settings["head_dim"]
    config = config_class(**settings)
    getattr(transformers, f"{prefix}ForCausalLM")(config).float().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PolicyModel]:
    return {
        name: load_policy_model(
            save(name, tmp_path_factory.mktemp(name)), dtype=torch.float32, chunk_tokens=64
        )
        for name in MODELS
    }


def with_prompt(rollouts: list[Rollout], tokens: int) -> list[Rollout]:
    return [replace(r, prompt_ids=np.arange(2, 2 + tokens, dtype=np.int32)) for r in rollouts]


BATCHES = {
    "responses of different lengths": make_batch(),
    "prompt of one token": with_prompt(make_batch(groups=1), 1),
    "prompts of different lengths": [*with_prompt(make_batch(groups=1), 9), *make_batch(1)],
    "identical responses": [make_rollout()] * 4,
    "groups of one": make_batch(groups=3, group_size=1),
}


def outputs(
    model: PolicyModel, batches: list[MicroBatch], count: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """(log-probs by response, those of heads by response, gradients of all weights)."""
    model.zero_grad()
    logp: dict[int, torch.Tensor] = {}
    head: dict[int, torch.Tensor] = {}
    for batch in batches:
        found = model(batch)
        weight = 1.0 + batch.sequence % 3
        loss = (found.logp * weight).sum() - (found.head_logp.exp() * weight[:, None]).sum()
        (loss / 50).backward()
        for i in batch.sequence.unique().tolist():
            own = batch.sequence == i
            logp[i], head[i] = found.logp[own].detach(), found.head_logp[own].detach()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [logp[i] for i in range(count)], [head[i] for i in range(count)], grads


@pytest.mark.parametrize("budget", [1000, 16], ids=["one row", "groups divided"])
@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_padded(models: dict[str, PolicyModel], name: str, case: str, budget: int) -> None:
    model, rollouts = models[name], BATCHES[case]
    assert model.shares_prompts
    packed = micro_batches(rollouts, budget=budget)
    assert len(packed) == 1 or budget == 16
    got = outputs(model, packed, len(rollouts))
    want = outputs(model, micro_batches(rollouts, budget=1000, packed=False), len(rollouts))
    for found, expected in zip(got, want, strict=True):
        assert len(found) == len(expected)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    assert any(float(g.abs().max()) > 1e-2 for g in want[2]), "gradients are not all close to 0"


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_the_window_matters(
    models: dict[str, PolicyModel], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences are longer than the window, so that the test above sees it."""
    model, (batch,) = models[name], micro_batches(make_batch(), budget=1000)
    assert batch.layout is not None
    assert int(batch.layout.position_ids.max()) > 8
    with torch.no_grad():
        windowed = model(batch).logp
        for owner in (model.lm.config, *model.modules()):
            if getattr(owner, "sliding_window", None):
                monkeypatch.setattr(owner, "sliding_window", 100)
        unlimited = model(batch).logp
    assert float((windowed - unlimited).abs().max()) > 1e-3


def test_recomputed_layers_share(tmp_path: Path) -> None:
    model = load_policy_model(save("Qwen3", tmp_path), dtype=torch.float32, chunk_tokens=64).train()
    rollouts = make_batch()
    plain = outputs(model, micro_batches(rollouts, budget=1000), len(rollouts))
    model.lm.gradient_checkpointing_enable({"use_reentrant": False})
    for found, expected in zip(
        outputs(model, micro_batches(rollouts, budget=1000), len(rollouts)), plain, strict=True
    ):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, atol=1e-6, rtol=0)


CANNOT = {
    "Lfm2": ("layers of type conv", {"layer_types": ["conv", "full_attention"], "intermediate_size": 64}),
    "Falcon": ("cannot be replaced", {"alibi": True, "head_dim": None}),
    "Jamba": ("recurrent layers", {"mamba_d_state": 4, "num_experts": 2, "use_mamba_kernels": False}),
}


@pytest.mark.parametrize("name", CANNOT)
def test_models_that_cannot_share_are_padded(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    reason, over = CANNOT[name]
    save(name, tmp_path, **over)
    with caplog.at_level(logging.INFO, logger=sharing.__name__):
        models = [load_policy_model(tmp_path, dtype=torch.float32, chunk_tokens=64) for _ in range(2)]
    assert not any(model.shares_prompts for model in models)
    assert caplog.text.count("prompts are computed once per response") == 1, "one line for theta and theta_s"
    assert reason in caplog.text
    (batch,) = micro_batches(make_batch(), budget=1000, packed=models[0].shares_prompts)
    assert torch.isfinite(models[0](batch).logp).all()


def test_what_is_wrong_in_spite_of_the_configuration_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that does not pass the layout on to its attention: responses would see their siblings."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    original = LlamaDecoderLayer.forward

    def forgetful(self, hidden_states, packed_layout=None, **options):  # type: ignore[no-untyped-def]
        return original(self, hidden_states, **{**options, "attention_mask": None})

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forgetful)
    with caplog.at_level(logging.INFO, logger=sharing.__name__):
        model = load_policy_model(
            save("Llama", tmp_path, vocab_size=VOCABULARY), dtype=torch.float32, chunk_tokens=64
        )
    assert not model.shares_prompts
    assert "hidden states differ by" in caplog.text
