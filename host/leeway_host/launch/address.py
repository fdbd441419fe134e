"""Where a run of this machine can be reached while it lives: the file DIR/.place, for its owner alone.

`leeway scale` and `leeway status` find the run's Redis by it; address and password change with every run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from leeway.errors import UsageError

FILE = ".place"


@dataclass(frozen=True)
class Place:
    """A run's name and the URL of its Redis."""

    run: str
    redis: str


@contextmanager
def published(out: Path, place: Place) -> Iterator[None]:
    """`place` in `out` while the context lasts."""
    path = out / FILE
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(asdict(place), file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find_place(out: Path) -> Place:
    """The place of the run in `out`. Raises UsageError when none is going on there."""
    try:
        return Place(**json.loads((out / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as exc:
        raise UsageError(f"{out}: no run is going on there ({out / FILE} cannot be read)") from exc
