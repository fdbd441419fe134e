"""What a checkpoint directory contains, by name and by its state file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leeway.errors import UsageError

CHECKPOINTS = "checkpoints"
LATEST = "latest"
STATE_FILE = "leeway.json"
MODEL_FILES = "model-files"
_NAME = re.compile(r"step-(\d+)")


class CheckpointError(UsageError):
    """A checkpoint cannot be read, or is damaged; the message names it, the file and what is wrong."""


class FileRecord(BaseModel):
    """A file of a checkpoint when it was written."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    size: int = Field(ge=0)
    crc32: int = Field(ge=0)


class TrainState(BaseModel):
    """What a resumed trainer must know besides weights and optimiser, and which files there must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal[1] = 1
    next_batch: int = Field(ge=0)
    """The batch of the next optimiser step, which is also the number of steps done."""
    version: int = Field(ge=0)
    """The weight version published last."""
    published_at: int = Field(ge=0)
    """Optimiser steps done when that version was published."""
    epoch: int = Field(ge=0)
    """The run epoch that wrote the checkpoint."""
    ranks: int = Field(ge=1)
    zero_stage: int = Field(ge=0, le=3)
    dtype: str
    model: str
    written: int = Field(default=0, ge=0)
    """Rises with every checkpoint written to the directory, also after going back to an earlier one."""
    files: dict[str, FileRecord] = Field(default_factory=dict)
    """Path in the checkpoint -> its size and checksum; empty in checkpoints of earlier versions."""


@dataclass(frozen=True)
class Found:
    """A checkpoint directory and its state; `state` is None if it cannot be read."""

    path: Path
    state: TrainState | None

    @property
    def age(self) -> tuple[int, int, int, int]:
        """Sorts checkpoints from the one written first to the one written last; unreadable ones first."""
        if self.state is None:
            return (-1, -1, -1, step_of(self.path) or 0)
        return (self.state.written, self.state.epoch, self.state.next_batch, step_of(self.path) or 0)


def checkpoint_name(step: int) -> str:
    """Name of the checkpoint that holds `step` optimiser steps."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """The number in a checkpoint's name, None for other names."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def is_checkpoint_name(name: str) -> bool:
    """Whether `name` is one that `checkpoint_name` gives."""
    return _NAME.fullmatch(name) is not None


def list_checkpoints(directory: Path) -> list[Found]:
    """The checkpoints in `directory`, whole or not, from the one written first to the one written last."""
    paths = [path for path in directory.glob("step-*") if path.is_dir() and step_of(path) is not None]
    return sorted((Found(path, _state_or_none(path)) for path in paths), key=lambda found: found.age)


def has_checkpoint(out: Path) -> bool:
    """Whether the run in `out` has written a checkpoint, whole or not."""
    directory = out / CHECKPOINTS
    return (directory / LATEST).exists() or bool(list_checkpoints(directory))


def read_state(checkpoint: Path) -> TrainState:
    """The state of a checkpoint directory. Raises CheckpointError when it cannot be read."""
    try:
        return TrainState.model_validate_json((checkpoint / STATE_FILE).read_bytes())
    except OSError as error:
        reason = error.strerror or str(error)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = f"{where}: {first['msg']}" if where else first["msg"]
    raise CheckpointError(f"checkpoint {checkpoint}: {STATE_FILE} cannot be read: {reason}")


def _state_or_none(checkpoint: Path) -> TrainState | None:
    try:
        return read_state(checkpoint)
    except CheckpointError:
        return None
