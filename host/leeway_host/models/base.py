"""What the ways to prepare a model have in common."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from leeway.errors import UsageError
from leeway.models.files import share_weights
from leeway_host.launch.environment import find_cache

Progress = Callable[[str], None]

PROVENANCE = "leeway_model.json"
"""File that records how a model in the cache was built."""


def default_cache_dir() -> Path:
    """`$LEEWAY_CACHE_DIR/models`; without it `$XDG_CACHE_HOME/leeway/models`, or below ~/.cache.

    Raises UsageError when there is no home directory.
    """
    cache = find_cache(os.environ)
    if cache is None:
        raise UsageError("there is no home directory: set LEEWAY_CACHE_DIR to a directory for models")
    return cache / "models"


def is_model_dir(path: Path) -> bool:
    """True if `path` contains a configuration and weights in safetensors format."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


@contextmanager
def publish_dir(target: Path) -> Iterator[Path]:
    """A temporary directory that becomes `target` in one rename if the block raises no error.

    If another process published `target` first, that one is kept and the temporary directory is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        share_weights(temporary)
        if target.exists() and not is_model_dir(target):
            shutil.rmtree(target)
        try:
            temporary.rename(target)
        except OSError:
            if not is_model_dir(target):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress progress bars and messages of transformers and of what it imports; errors are still raised.

    stdout belongs to the command (`leeway run --json`), the terminal to its live table. Do not report
    progress inside: it would be suppressed as well.
    """
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        from transformers.utils import logging

        bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


def write_provenance(directory: Path, record: dict[str, Any]) -> None:
    """Record in the directory how the model was built."""
    (directory / PROVENANCE).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def read_provenance(directory: Path) -> dict[str, Any]:
    """What `write_provenance` wrote; empty for models that were not built here."""
    file = directory / PROVENANCE
    return json.loads(file.read_text()) if file.is_file() else {}
