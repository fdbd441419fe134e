"""Which checkpoint a resume reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leeway.checkpoints.damage import check_whole, describe_way_out, newest_whole
from leeway.checkpoints.disk import replace_text
from leeway.checkpoints.state import (
    CHECKPOINTS,
    LATEST,
    STATE_FILE,
    CheckpointError,
    Found,
    TrainState,
    has_checkpoint,
    is_checkpoint_name,
    list_checkpoints,
    read_state,
    step_of,
)
from leeway.errors import UsageError


def find_checkpoint(path: str | Path, step: int | None = None) -> Path:
    """The checkpoint that `path` refers to: itself, the latest in it, or the latest in its `checkpoints`.

    `step`: the one that holds this many optimiser steps instead of the latest. If there is no pointer to the
    latest, the one written last. Raises UsageError when there is none, CheckpointError when it is damaged
    (sizes only).
    """
    given = Path(path)
    if step is None and given.is_dir() and (step_of(given) is not None or (given / STATE_FILE).is_file()):
        check_whole(given, contents=False)
        return given
    for place in (given, given / CHECKPOINTS):
        known = list_checkpoints(place)
        if not known and not (place / LATEST).exists():
            continue
        found = _of_step(place, known, step) if step is not None else _latest(place)
        check_whole(found, contents=False)
        return found
    raise UsageError(
        f"no checkpoint in {given}: expected step-* and a file {LATEST!r} that names one of them"
    )


def _of_step(place: Path, known: Sequence[Found], step: int) -> Path:
    steps = {step_of(found.path): found.path for found in known}
    if step not in steps:
        there = ", ".join(str(number) for number in sorted(n for n in steps if n is not None)) or "none"
        raise UsageError(f"{place} has no checkpoint of step {step}; there are: {there}")
    return steps[step]


def _latest(place: Path) -> Path:
    pointer = place / LATEST
    try:
        name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        # The trainer died between its first checkpoint and the pointer to it.
        return newest_whole(place) or list_checkpoints(place)[-1].path
    except OSError as error:
        raise CheckpointError(f"{pointer} cannot be read: {error.strerror}") from error
    if not is_checkpoint_name(name):
        what = f"contains {name[:40]!r}" if name else "is empty"
        way_out = describe_way_out(place)
        raise CheckpointError(f"{pointer} {what}, expected the name of a checkpoint; {way_out}")
    return place / name


def read_latest(out: Path) -> TrainState | None:
    """State of the checkpoint that a resume of the run in `out` reads; None when there is none.

    Raises CheckpointError when it is damaged.
    """
    return read_state(find_checkpoint(out)) if has_checkpoint(out) else None


def roll_back(out: Path, step: int) -> Path:
    """Make the checkpoint of `step` the one that the run in `out` resumes from, now and after a restart.

    Raises UsageError when there is none, CheckpointError when it is damaged.
    """
    found = find_checkpoint(out, step)
    check_whole(found, contents=True)
    replace_text(found.parent / LATEST, found.name)
    return found
