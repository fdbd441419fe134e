"""Fixtures of the trainer's tests: a tiny random model, one process group for all tests of the session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # trainer_support, which worker processes import too


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with tied embeddings, about 50 k parameters, float32."""
    from trainer_support import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[object]:
    """This process as the only trainer rank, on the CPU."""
    from leeway_trainer.ranks import start_ranks, stop_ranks

    yield start_ranks("cpu", 1, 120.0)
    stop_ranks()


@pytest.fixture
def setup(tiny_dir: Path, keys: Any, client: Any, tmp_path: Path) -> Any:
    """What a trainer of the tiny model is started with."""
    from leeway_trainer.epochs import TrainerSetup

    return TrainerSetup(str(tiny_dir), tmp_path / "run", keys, client)
