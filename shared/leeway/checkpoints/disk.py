"""Writing so that a crash leaves the old or the new, and nothing in between."""

from __future__ import annotations

import os
from pathlib import Path


def sync_tree(directory: Path) -> None:
    """Flush a directory and everything in it to disk."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Replace a small file in one rename, on disk when this returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
