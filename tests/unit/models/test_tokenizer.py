"""A tokenizer that Leeway saved is loaded without torch, and is the one that AutoTokenizer returns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from leeway.config.load import build_config
from leeway.models.files import OURS
from leeway.models.tokenizer import load_tokenizer
from leeway_host.models import prepare_model

pytestmark = pytest.mark.thorough

TEXTS = ["12 345", " 6  7", "<bos>8<eos>", "été 9", ""]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    params = {"hidden": 32, "layers": 1, "warmup_steps": 0}
    config = build_config({"task": {"kind": "digits"}, "model": {"name": "tiny", "params": params}})
    return prepare_model(config.model, tmp_path_factory.mktemp("cache"), task=config.task)


def test_it_is_the_one_that_transformers_finds(model: Path) -> None:
    ours, theirs = load_tokenizer(model), AutoTokenizer.from_pretrained(str(model))
    assert type(ours) is type(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


def test_torch_is_not_imported(model: Path) -> None:
    code = (
        "import sys; from leeway.models.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(model)], check=True, timeout=120)


@pytest.mark.parametrize("foreign", ["no record", "another class"])
def test_other_models_are_left_to_transformers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: str
) -> None:
    for file in model.iterdir():
        if file.suffix != ".safetensors" and (file.name != OURS or foreign == "another class"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    if foreign == "another class":
        settings = tmp_path / "tokenizer_config.json"
        settings.write_text(
            json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "LlamaTokenizer"})
        )
    asked = []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **_: asked.append(name))
    load_tokenizer(tmp_path)
    assert asked == [str(tmp_path)]
