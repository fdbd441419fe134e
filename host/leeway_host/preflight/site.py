"""What the checks of a run look at: its configuration, its directory, its environment, its model."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leeway.config import RunConfig
from leeway.errors import UsageError

MAX_HEADER = 100 << 20
"""Maximum size of a safetensors header, as in the reference implementation."""


@dataclass(frozen=True)
class ModelFacts:
    """What the files of a prepared model say. `parameters`: elements of all tensors; tied ones count once."""

    directory: Path
    parameters: int
    weight_bytes: int
    config: dict[str, Any]

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the configuration that describes the language model."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config


@dataclass(frozen=True)
class Site:
    """`out` need not exist yet. `model` is None while the model is not prepared."""

    config: RunConfig
    out: Path
    environ: Mapping[str, str]
    model: ModelFacts | None = None


def read_model(directory: Path) -> ModelFacts:
    """Sizes of the tensors in `directory`, from the headers alone. Raises UsageError for damaged files."""
    config = _read_json(directory / "config.json")
    parameters = nbytes = 0
    for path in weight_files(directory):
        for name, tensor in read_header(path).items():
            if name == "__metadata__":
                continue
            size = 1
            for length in tensor["shape"]:
                size *= length
            begin, end = tensor["data_offsets"]
            parameters, nbytes = parameters + size, nbytes + end - begin
    return ModelFacts(directory, parameters, nbytes, config)


def weight_files(directory: Path) -> list[Path]:
    """The files that are loaded: model.safetensors, or those of the index, or all there are."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        return [directory / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
    return sorted(directory.glob("*.safetensors"))


def read_header(path: Path) -> dict[str, Any]:
    """Name -> dtype, shape and data_offsets. Raises UsageError when the file is damaged or too short."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
        if path.stat().st_size < expected:
            raise ValueError(f"{path.stat().st_size} bytes, expected {expected}: it is incomplete")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as exc:
        raise UsageError(f"{path} is not a safetensors file that can be read: {exc}") from exc
    return header


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(found, dict):
        raise UsageError(f"{path} contains a {type(found).__name__}, expected an object")
    return found
