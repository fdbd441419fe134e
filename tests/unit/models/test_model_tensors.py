"""Tensors that are missing, unexpected, mis-shaped or mis-typed are refused by name; tied ones may lack."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from leeway.errors import UsageError
from leeway.models.base import ModelError
from leeway.models.tensors import check_tensors
from leeway_trainer.model import load_policy_model

Tensors = dict[str, torch.Tensor]
OUTPUT, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers, with and without an output layer of its own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=request.param,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if not any(part in k for part in parts)}


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name])}


CASES: list[tuple[Callable[[Tensors], Tensors], str | None]] = [
    (lambda tensors: tensors, None),
    (without("layers.1.mlp"), r"3 tensors are missing.*model\.layers\.1\.mlp\.down_proj\.weight, "),
    (without(NORM), r"1 tensor is missing.*model\.norm\.weight"),
    (without("layers.1."), r"11 tensors are missing.* and 7 more"),
    (without("embed_tokens", "lm_head"), r"missing.*model\.embed_tokens\.weight"),
    (
        lambda tensors: tensors | {"model.layers.2.mlp.up_proj.weight": tensors[UP].clone()},
        r"1 tensor is not part of the architecture.*model\.layers\.2\.mlp\.up_proj\.weight",
    ),
    (
        replaced(UP, lambda t: t[:-1].clone()),
        r"1 tensor is of the wrong shape: .*up_proj\.weight is \[63, 32\], exp",
    ),
    (
        replaced(EMBEDDING, lambda t: t[:60].clone()),
        r"embed_tokens\.weight is \[60, 32\], expected \[64",
    ),
    (replaced(UP, lambda t: t.to(torch.int8)), r"1 weight is not stored as BF16.*up_proj\.weight is I8"),
    (replaced(NORM, lambda t: t.to(torch.float8_e4m3fn)), r"model\.norm\.weight is F8_E4M3"),
    (replaced(NORM, lambda t: t.half()), None),
]


@pytest.mark.parametrize(("change", "words"), CASES)
def test_tensors(
    model: Path, tmp_path: Path, change: Callable[[Tensors], Tensors], words: str | None
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    if words is None:
        check_tensors(directory)
        return
    with pytest.raises(ModelError, match=words):
        check_tensors(directory)
    with pytest.raises(UsageError, match=words):  # the trainer refuses the same when it loads them
        load_policy_model(directory, dtype=torch.float32, chunk_tokens=4)


def test_only_a_tied_output_layer_may_be_missing(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tied = OUTPUT not in tensors
    save_file(without(OUTPUT)(tensors), file, metadata={"format": "pt"})
    if tied:
        check_tensors(directory)
    else:
        with pytest.raises(ModelError, match=r"1 tensor is missing.*lm_head\.weight"):
            check_tensors(directory)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        (
            {NORM: "model-00002-of-00002.safetensors"},
            r"model-00002-of-00002\.safetensors, which .* is missing",
        ),
        (
            {"model.lost.weight": "model-00001-of-00002.safetensors"},
            r"1 of \d+ tensors .* model\.lost\.weight",
        ),
        ({NORM: None}, r"weight_map in .* must map names of tensors to names of files"),
    ],
    ids=["file", "tensor", "null"],
)
def test_an_index_that_does_not_fit_its_files(
    model: Path, tmp_path: Path, weight_map: dict[str, str | None], words: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    first = directory / "model-00001-of-00002.safetensors"
    (directory / "model.safetensors").rename(first)
    index = {"weight_map": dict.fromkeys(load_file(first), first.name) | weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=words):
        check_tensors(directory)


def test_an_index_that_is_no_mapping(model: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    with pytest.raises(ModelError, match="weight_map"):
        check_tensors(tmp_path)


@pytest.mark.parametrize(
    ("change", "refused"),
    [(lambda t: t.clone(), False), (lambda t: t + 1, True), (lambda t: t * (t != t[-1]), True)],
    ids=["the same", "all rows", "the last row"],
)
def test_an_output_layer_beside_the_embedding_it_is_tied_to(
    model: Path, tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], refused: bool
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tied = OUTPUT not in tensors
    save_file(tensors | {OUTPUT: change(tensors[EMBEDDING])}, file, metadata={"format": "pt"})
    if tied and refused:
        words = r"lm_head\.weight and model\.embed_tokens\.weight differ, but tie_word_embeddings is true"
        with pytest.raises(ModelError, match=words):
            check_tensors(directory)
        with pytest.raises(UsageError, match="tie_word_embeddings"):
            load_policy_model(directory, dtype=torch.float32, chunk_tokens=4)
    else:
        check_tensors(directory)


def test_quantised_models_are_refused_by_method(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quant_method 'awq'"):
        check_tensors(directory)
