"""What the checks of a model directory have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leeway.errors import UsageError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


class ModelError(UsageError, ValueError):
    """A model that cannot be used; the message names it and the reason."""


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file, {} if there is none. Raises ModelError if it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"model {path.parent}: {path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"model {path.parent}: {path.name} holds no JSON object")
    return value


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a model's configuration that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def embedding_rows(config: Mapping[str, Any]) -> int | None:
    """Rows of the embedding according to config.json; None if it does not say."""
    rows = text_config(config).get("vocab_size")
    return rows if isinstance(rows, int) else None


def model_directory(source: str | Path) -> Path:
    """The directory of a model: itself, or the local snapshot of a hub id. Raises ModelError."""
    directory = Path(source)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(str(source), local_files_only=True))
    except (OSError, HFValidationError) as error:
        raise ModelError(f"model {source} is neither a directory nor in the local cache") from error


def first_few(names: Sequence[str], limit: int = 4) -> str:
    """`a, b and 7 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
