"""Which checkpoints are kept. By the order in which they were written, not by their numbers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from leeway.checkpoints.damage import find_damage
from leeway.checkpoints.state import LATEST, Found, list_checkpoints


def next_written(directory: Path) -> int:
    """The number of the next checkpoint that is written to `directory`."""
    states = [found.state for found in list_checkpoints(directory)]
    return 1 + max((state.written for state in states if state is not None), default=0)


def plan_pruning(known: Sequence[Found], whole: set[Path], latest: Path | None, keep: int) -> list[Path]:
    """The checkpoints to delete: all but the `keep` whole ones written last, and never `latest`.

    Step numbers do not count: after going back to step 10, step 20 of the abandoned history is older than
    the step 11 written after it.
    """
    candidates = [found.path for found in sorted(known, key=lambda f: f.age) if found.path in whole]
    others = [path for path in candidates if path != latest]
    room = keep - (latest is not None)
    kept = {latest, *(others[-room:] if room > 0 else [])}
    return [found.path for found in known if found.path not in kept]


def prune(directory: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, damaged ones, and what unfinished writes left behind.

    The checkpoint that the pointer names is always kept, and counts among the newest.
    """
    known = list_checkpoints(directory)
    pointer = directory / LATEST
    latest = directory / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
    whole = {found.path for found in known if find_damage(found.path, contents=False) is None}
    for path in plan_pruning(known, whole, latest, keep):
        path.rename(set_aside(path))
    for left in [*directory.glob(".step-*.old"), *directory.glob(".step-*.tmp")]:
        shutil.rmtree(left, ignore_errors=True)


def set_aside(checkpoint: Path) -> Path:
    """Where a checkpoint is renamed to before it is deleted; whatever is there is deleted first."""
    aside = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    return aside
