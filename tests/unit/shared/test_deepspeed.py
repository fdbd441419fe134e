"""`trainer.deepspeed`: keys that Leeway owns are rejected by name, everything else passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leeway.config.deepspeed import OWNED, UNSUPPORTED, check_deepspeed
from leeway.config.load import build_config
from leeway.errors import ConfigError

ROOT = Path(__file__).parents[3]

PASTED: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "steps_per_print": 100,
    "wall_clock_breakdown": False,
}
"""A configuration as tutorials have it."""


def nested(key: str, value: object) -> dict[str, Any]:
    """`{"a": {"b": value}}` for the key a.b."""
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


@pytest.mark.parametrize("key", OWNED)
def test_a_key_that_leeway_owns_is_rejected_with_both_names(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"task": {"kind": "digits"}, "trainer": {"deepspeed": nested(key, 4)}})
    assert f"trainer.deepspeed: {key} = 4 is set by Leeway" in str(caught.value)
    assert OWNED[key] in str(caught.value)


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_the_trainer_cannot_run_with_is_rejected(key: str) -> None:
    assert check_deepspeed({key: {"enabled": True}}) == [f"{key} is not supported: {UNSUPPORTED[key]}"]


@pytest.mark.parametrize(
    ("trainer", "named"),
    [
        (
            {"deepspeed": {"gradient_accumulation_steps": 4, "train_batch_size": 4}},
            ["gradient_accumulation_steps", "train_batch_size", "batch.prompts"],
        ),
        (
            {"zero_stage": 0, "deepspeed": {"zero_optimization": {"stage": 3}}},
            ["zero_optimization.stage", "trainer.zero_stage"],
        ),
        (
            {"deepspeed": PASTED},
            ["train_batch_size", "gradient_clipping", "bf16", "optimizer.params.lr", "scheduler", "stage"],
        ),
    ],
    ids=["accumulation", "stage", "pasted"],
)
def test_all_problems_of_a_pasted_file_are_in_one_message(trainer: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"task": {"kind": "digits"}, "trainer": trainer})
    assert [name for name in named if name not in str(caught.value)] == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "overlap_comm": True}},
        {"optimizer": {"params": {"eps": 1e-6}}},
        {"communication_data_type": "fp32", "wall_clock_breakdown": True},
    ],
)
def test_other_keys_pass(settings: dict[str, Any]) -> None:
    assert check_deepspeed(settings) == []


def test_every_owned_key_is_documented() -> None:
    page = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
    assert [key for key in [*OWNED, *UNSUPPORTED] if f"`{key}`" not in page] == []
