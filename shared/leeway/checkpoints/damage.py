"""Whether a checkpoint is whole: every file has the size, and the contents, that were written."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from leeway.checkpoints.state import (
    CHECKPOINTS,
    STATE_FILE,
    CheckpointError,
    FileRecord,
    list_checkpoints,
    read_state,
    step_of,
)

READ_BYTES = 16 << 20


def record_files(checkpoint: Path) -> dict[str, FileRecord]:
    """Size and checksum of every file in a checkpoint but its STATE_FILE."""
    paths = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p != checkpoint / STATE_FILE)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sums = list(pool.map(_crc32, paths))
    return {
        path.relative_to(checkpoint).as_posix(): FileRecord(size=path.stat().st_size, crc32=value)
        for path, value in zip(paths, sums, strict=True)
    }


def find_damage(checkpoint: Path, *, contents: bool) -> str | None:
    """What is wrong with a checkpoint, None if it is whole.

    Compares the sizes of its files with those that were written, and with `contents` also their checksums,
    which reads all of them.
    """
    if not checkpoint.is_dir():
        return "the directory does not exist"
    try:
        state = read_state(checkpoint)
    except CheckpointError as error:
        return str(error).removeprefix(f"checkpoint {checkpoint}: ")
    for name, record in state.files.items():
        path = checkpoint / name
        try:
            size = path.stat().st_size
            if size != record.size:
                return f"{name} has {size} bytes, expected {record.size}"
            if contents and _crc32(path) != record.crc32:
                return f"the contents of {name} differ from what was written (CRC-32)"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    if not state.files and not any(path.is_file() for path in checkpoint.glob("*/*")):
        return "it contains no weights"
    return None


def check_whole(checkpoint: Path, *, contents: bool) -> None:
    """Raise CheckpointError if the checkpoint is damaged: how, and from which one the run can continue."""
    damage = find_damage(checkpoint, contents=contents)
    if damage is not None:
        raise CheckpointError(
            f"checkpoint {checkpoint} is damaged: {damage}; {describe_way_out(checkpoint.parent, checkpoint)}"
        )


def newest_whole(directory: Path, *, but: Path | None = None) -> Path | None:
    """The checkpoint written last whose files have their sizes, other than `but`."""
    for found in reversed(list_checkpoints(directory)):
        if found.path != but and find_damage(found.path, contents=False) is None:
            return found.path
    return None


def describe_way_out(directory: Path, bad: Path | None = None) -> str:
    """How a run whose latest checkpoint cannot be read continues from another one than `bad`."""
    run = directory.parent if directory.name == CHECKPOINTS else directory
    other = newest_whole(directory, but=bad)
    if other is None:
        return f"{directory} contains no whole checkpoint: start over with another --out"
    return (
        f"the newest whole checkpoint is {other.name}: to continue from it, "
        f"leeway run --resume {run} --resume-from {step_of(other)}"
    )


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            value = zlib.crc32(block, value)
    return value
