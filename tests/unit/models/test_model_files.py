"""Everything that is not weights is kept as it came."""

from __future__ import annotations

from pathlib import Path

import pytest

from leeway.models.base import ModelError
from leeway.models.files import copy_model_files, keep_model_files, publish

KEPT = {
    "config.json": "{ }\n",
    "generation_config.json": '{"temperature": 0.6, "top_p": 0.9}',
    "tokenizer.json": "not even JSON",
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}\r\n",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "modeling_own.py": "raise SystemExit",
    "vocab.txt": "ä",
    "README.md": "mine",
}
LEFT = [
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "original/consolidated.00.pth",
    "model.gguf",
    ".git/config",
    ".gitattributes",
    "__pycache__/modeling_own.pyc",
    "leeway_model.json",
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / ".hidden" / "source"
    for name in [*KEPT, *LEFT]:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(KEPT.get(name, "weights").encode())
    return directory


def test_files_are_copied_byte_for_byte(source: Path, tmp_path: Path) -> None:
    keep_model_files(source, tmp_path / "run" / "model-files")
    copy_model_files(tmp_path / "run" / "model-files", tmp_path / "export")
    for copy in (tmp_path / "run" / "model-files", tmp_path / "export"):
        found = {p.relative_to(copy).as_posix(): p.read_bytes() for p in copy.rglob("*") if p.is_file()}
        assert found == {name: text.encode() for name, text in KEPT.items()}
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["model-files"]


def test_a_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        copy_model_files(tmp_path, tmp_path / "export")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read")
def test_a_file_that_cannot_be_read_is_named(source: Path, tmp_path: Path) -> None:
    (source / "notes.txt").symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=r"Input/output error: '.*notes\.txt' -> '.*export/notes\.txt'"):
        copy_model_files(source, tmp_path / "export")


def test_a_published_directory_replaces_the_old_one_completely(tmp_path: Path) -> None:
    for name, text in (("new", "2"), ("model", "1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(text)
    publish(tmp_path / "new", tmp_path / "model")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "new.txt"]
