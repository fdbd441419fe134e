"""The same numbers through TRL's GRPO losses and ours: equal gradients of a model's weights.

TRL's own trainer scores canned completions, makes its importance-sampling ratio and its loss from them; only
the generation is replaced. Where TRL asks for pi_old it is the model before its weights were changed (lag).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leeway.config import build_correction
from leeway.corrections import Denominators, TokenBatch, advantages, surrogate_loss

pytestmark = pytest.mark.thorough

pytest.importorskip("trl", reason="TRL is not installed; make setup installs it")

PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
COMPLETIONS = [[10, 11, 12, 3], [13, 14], [15, 16, 17, 18, 19, 20], [21]]
REWARDS = [1.0, 0.25, -0.5, 0.75]
LONGEST = 6
Build = Callable[..., Any]


def small_model() -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.3,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double()


def small_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 32)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """(TRL settings, scale of the sampler's discrepancy) -> a GRPOTrainer and its inputs."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        # Nothing is generated here, and importing vLLM takes most of the time of these tests.
        utilities = import_module("trl.import_utils")
        patch.setattr(utilities, "is_vllm_available", lambda min_version=None: False)
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    out: Path = tmp_path_factory.mktemp("trl")

    def make(*, discrepancy: float = 0.0, vllm: bool = False, **settings: Any) -> Any:
        config = GRPOConfig(
            output_dir=str(out), use_cpu=True, report_to=[], per_device_train_batch_size=4, num_generations=2,
            max_completion_length=LONGEST, beta=0.0, gradient_checkpointing=False, bf16=False,
            **settings,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=small_model(),
            reward_funcs=lambda completions, **_: REWARDS,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "w5"}]),
            processing_class=small_tokenizer(),
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.use_vllm = vllm  # only asks for the correction: there is nothing to generate
        trainer.model.train()
        noise = torch.Generator().manual_seed(1)
        logps = [
            (row + discrepancy * torch.randn(len(row), generator=noise)).tolist()
            for row in _log_probs(trainer.model)
        ]
        trainer._generate = lambda prompts: (
            PROMPTS, COMPLETIONS, None, ["" for _ in PROMPTS], logps, {}, None, None,
        )  # fmt: skip
        inputs = trainer._generate_and_score_completions([{"prompt": ""} for _ in PROMPTS])
        return trainer, inputs, logps

    return make


def _log_probs(model: Any) -> list[Tensor]:
    """log pi of each completion's tokens, one sequence at a time."""
    result = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.tensor([prompt + completion])
        every = torch.log_softmax(model(input_ids=ids).logits[0], -1)
        at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
        result.append(every[at, torch.tensor(completion)])
    return result


def add_lag(model: torch.nn.Module, scale: float) -> None:
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)


def gradients(loss: Tensor, model: torch.nn.Module) -> Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)
    return torch.cat([g.flatten() for g in found if g is not None])


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none-dapo": ({"loss_type": "dapo"}, {"method": "none"}),
    "none-dr_grpo": ({"loss_type": "dr_grpo"}, {"method": "none", "aggregation": "constant"}),
    "tis": (
        {
            "loss_type": "dapo",
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 1.5,
            "vllm_importance_sampling_clip_min": 0.0,
        },
        {"method": "tis", "clip": 1.5},
    ),
    "tis-sequence": (
        {
            "loss_type": "grpo",
            "vllm_importance_sampling_mode": "sequence_truncate",
            "vllm_importance_sampling_clip_max": 1.5,
            "vllm_importance_sampling_clip_min": 0.7,
        },
        {
            "method": "tis",
            "level": "sequence",
            "clip": 1.5,
            "clip_low": 0.7,
            "aggregation": "seq-mean-token-mean",
        },
    ),
    "icepop": (
        {
            "loss_type": "dapo",
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_max": 1.5,
            "vllm_importance_sampling_clip_min": 0.7,
        },
        {"method": "icepop", "low": 0.7, "high": 1.5},
    ),
    "mis-sequence": (
        {
            "loss_type": "dr_grpo",
            "vllm_importance_sampling_mode": "sequence_mask",
            "vllm_importance_sampling_clip_max": 1.5,
        },
        {
            "method": "mis",
            "level": "sequence",
            "low": 0.0,
            "high": 1.5,
            "aggregation": "constant",
        },
    ),
    "ppo-dapo": (
        {"loss_type": "dapo", "delta": 1.5},
        {"method": "ppo", "reference": "prox", "dual_clip": 1.5},
    ),
    "ppo-grpo": (
        {"loss_type": "grpo", "epsilon_high": 0.28, "delta": 3.0},
        {"method": "ppo", "reference": "prox", "clip_high": 0.28, "aggregation": "seq-mean-token-mean"},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.04},
        {"method": "gspo", "reference": "prox", "clip_low": 0.05, "clip_high": 0.04},
    ),
    "decoupled_ppo": (
        {
            "loss_type": "dapo",
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_max": 1.5,
        },
        {"method": "decoupled_ppo", "behave_weight_cap": 1.5},
    ),
}
LAGGING = ("ppo-dapo", "ppo-grpo", "gspo", "decoupled_ppo")


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_trl(build: Build, case: str) -> None:
    theirs, ours = CASES[case]
    corrected = "vllm_importance_sampling_mode" in theirs
    # One iteration more than there are steps a generation makes TRL keep pi_old.
    trainer, inputs, logps = build(
        discrepancy=0.4 if corrected else 0.0, vllm=corrected, num_iterations=2, **theirs
    )
    model = trainer.model
    before = [row.detach() for row in _log_probs(model)]
    if case in LAGGING:
        add_lag(model, 0.05)
    want = gradients(trainer._compute_loss(model, inputs), model)

    config = build_correction(ours)
    logp = torch.cat(_log_probs(model))
    lengths = torch.tensor([len(c) for c in COMPLETIONS])
    owner = torch.repeat_interleave(torch.arange(len(COMPLETIONS)), lengths)
    batch = TokenBatch(
        logp=logp,
        logp_sync=torch.cat(before),
        logp_mu=torch.tensor([p for row in logps for p in row], dtype=torch.float32).double(),
        logp_prox=torch.cat(before),
        advantages=inputs["advantages"].double()[owner],
        mask=torch.ones_like(owner, dtype=torch.bool),
        seq_ids=owner,
        denominators=Denominators(int(lengths.sum()), len(COMPLETIONS), LONGEST),
    )
    got = gradients(surrogate_loss(batch, config)[0], model)

    assert float(want.norm()) > 0
    assert float((got - want).norm()) <= 1e-6 * float(want.norm())
    # The case would also notice a correction that does nothing.
    nothing = build_correction({**config.common(), "method": "none"})
    plain = gradients(surrogate_loss(batch, nothing)[0], model)
    if config.method != "none":
        assert float((plain - want).norm()) > 1e-2 * float(want.norm())


@pytest.mark.parametrize(("scale", "kind"), [("none", "dr_grpo"), ("group", "grpo")])
def test_advantages_equal_those_of_trl(build: Build, scale: str, kind: str) -> None:
    _, inputs, _ = build(scale_rewards=scale)
    groups = torch.tensor(REWARDS, dtype=torch.float64).view(2, 2)
    got = advantages(groups, kind)
    if kind == "grpo":  # TRL adds 1e-4 to the standard deviation, GRPO's paper and ours 1e-6
        std = groups.std(1, keepdim=True)
        got = got * (std + 1e-6) / (std + 1e-4)
    torch.testing.assert_close(inputs["advantages"].double(), got.flatten(), atol=1e-6, rtol=1e-6)
