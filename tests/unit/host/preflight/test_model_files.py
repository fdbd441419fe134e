"""The files of a model: damaged, incomplete, of other sizes than the configuration says."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from preflight_support import config_of, edit_json, facts, levels, text_of

from leeway.errors import UsageError
from leeway_host.preflight.model import check_files, judge_length
from leeway_host.preflight.site import Site, read_model


def write_tensors(path: Path, cut: int = 0, **shapes: tuple[int, ...]) -> None:
    """A safetensors file of zeros in bfloat16, without its last `cut` bytes."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name.replace("__", ".")] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(at)
    path.write_bytes(content[: len(content) - cut])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    edit_json(
        tmp_path / "config.json",
        architectures=["Qwen3ForCausalLM"],
        vocab_size=16,
        max_position_embeddings=64,
    )
    write_tensors(
        tmp_path / "model.safetensors", model__embed_tokens__weight=(16, 4), model__norm__weight=(4,)
    )
    return tmp_path


def check(model: Path, **sections: Any) -> list[Any]:
    sections = {"model": {"max_length": 64}, **sections}
    return check_files(Site(config_of(**sections), model / "out", {}, read_model(model)))


def test_a_good_model(model: Path) -> None:
    found = check(model)
    assert levels(found) == {"ok"} and "Qwen3ForCausalLM, 0.00 M parameters" in text_of(found)
    assert read_model(model).parameters == 16 * 4 + 4


def test_shards_count_once(model: Path) -> None:
    for number in (1, 2):
        write_tensors(model / f"shard-{number}.safetensors", w=(10,))
    (model / "model.safetensors").rename(model / "consolidated.safetensors")
    edit_json(
        model / "model.safetensors.index.json",
        weight_map={"a": "shard-1.safetensors", "b": "shard-2.safetensors", "c": "shard-2.safetensors"},
    )
    assert read_model(model).parameters == 20


@pytest.mark.parametrize("cut", [1, 100, 10_000])
def test_a_download_that_was_cut_off(model: Path, cut: int) -> None:
    write_tensors(model / "model.safetensors", cut=cut, w=(100,))
    with pytest.raises(UsageError, match=r"model\.safetensors is not a safetensors file"):
        read_model(model)


def test_a_header_that_is_none(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UsageError, match="is not a safetensors file"):
        read_model(model)


def test_a_missing_shard(model: Path) -> None:
    (model / "model.safetensors").unlink()
    edit_json(model / "model.safetensors.index.json", weight_map={"a": "gone.safetensors"})
    with pytest.raises(UsageError, match=r"gone\.safetensors"):
        read_model(model)


def test_other_rows_than_the_vocabulary(model: Path) -> None:
    edit_json(model / "config.json", vocab_size=32)
    found = check(model)
    assert "model.embed_tokens.weight has 16 rows, config.json says vocab_size=32" in text_of(found)


@pytest.mark.parametrize(
    "config", [{"max_position_embeddings": 64}, {"text_config": {"max_position_embeddings": 64}}]
)
def test_more_positions_than_the_model_has(config: dict[str, Any]) -> None:
    found = judge_length(facts(**config), 65)
    assert levels(found) == {"error"} and "set model.max_length to at most 64" in text_of(found)
    assert judge_length(facts(**config), 64) == []


def test_a_config_that_is_no_object(model: Path) -> None:
    (model / "config.json").write_text("[]")
    with pytest.raises(UsageError, match="expected an object"):
        read_model(model)
