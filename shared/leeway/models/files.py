"""Everything in a model directory that is not weights: configuration, tokenizer, chat template, code.

These files are copied as they came. transformers would write them anew, and refuses to write some that it
reads: a generation_config.json with a temperature but without `do_sample`, for example.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from leeway.checkpoints.disk import sync, sync_tree
from leeway.models.base import CONFIG, ModelError

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data"}
"""Suffixes of files that hold weights."""
OURS = "leeway_model.json"
"""Says how a built-in model was made; it does not describe a model that was trained further."""


LFS_POINTER = b"version https://git-lfs"


def absent_files(directory: Path) -> list[str]:
    """Files that a directory names but does not hold: broken links, and pointers of Git LFS."""
    found = []
    for path in sorted(directory.iterdir()):
        if path.is_symlink() and not path.exists():
            found.append(f"{path.name} is a link to {path.readlink()}, which does not exist")
        elif path.is_file():
            with path.open("rb") as file:
                if file.read(len(LFS_POINTER)) == LFS_POINTER:
                    found.append(f"{path.name} is a pointer of Git LFS without the content (git lfs pull)")
    return found


def model_files(source: Path) -> list[Path]:
    """Paths in `source`, relative to it, of all files that are not weights; hidden ones are left out."""
    found = []
    for path in sorted(source.rglob("*")):
        part = path.relative_to(source)
        hidden = any(name.startswith((".", "__pycache__")) for name in part.parts)
        weights = path.suffix in WEIGHTS or path.name.endswith(tuple(f"{s}.index.json" for s in WEIGHTS))
        if path.is_file() and not hidden and not weights and path.name != OURS:
            found.append(part)
    return found


def copy_model_files(source: Path, target: Path) -> None:
    """Copy all files that are not weights from one model directory to another.

    Raises ModelError, and OSError that names the file.
    """
    if not (source / CONFIG).is_file():
        raise ModelError(f"model {source} has no {CONFIG}")
    for part in model_files(source):
        try:
            (target / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / part, target / part)
        except OSError as error:
            if error.filename is None:  # read and write do not know the file's name
                error.filename, error.filename2 = str(source / part), str(target / part)
            raise


def keep_model_files(source: Path, target: Path) -> None:
    """Make `target` a copy of the files of `source` that are not weights, in one rename."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    copy_model_files(source, temporary)
    publish(temporary, target)


def share_weights(directory: Path) -> None:
    """Let whoever may read `directory` read its weights, which safetensors writes for their owner alone."""
    mode = directory.stat().st_mode & 0o666
    for path in directory.glob("*.safetensors"):
        path.chmod(mode)


def publish(temporary: Path, target: Path) -> None:
    """Put a finished directory in the place of `target`: it is on disk, and complete, or not there."""
    sync_tree(temporary)
    aside = target.with_name(f".{target.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        target.rename(aside)
    temporary.rename(target)
    sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)
