"""How to reach a run on this machine while it is alive: the file DIR/.address, readable only by its owner.

`leeway scale` and `leeway status` use it to find the run's Redis, whose port and password change with every
run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from leeway.errors import UsageError

FILE = ".address"


@dataclass(frozen=True)
class RunAddress:
    """A run's name and the URL of its Redis."""

    run: str
    redis: str


@contextmanager
def published(out: Path, address: RunAddress) -> Iterator[None]:
    """Keep `address` in the directory `out` for as long as the context is open."""
    path = out / FILE
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(asdict(address), file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find_address(out: Path) -> RunAddress:
    """The address of the run in `out`. Raises UsageError when no run is active there."""
    try:
        return RunAddress(**json.loads((out / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as exc:
        raise UsageError(f"{out}: no run is active there ({out / FILE} cannot be read)") from exc
