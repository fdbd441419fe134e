"""Loading DeepSpeed's files without running code from them.

torch.load executes what a pickle asks for unless it loads weights only. DeepSpeed asks for the former
explicitly, also in its own tools; torch's own variable overrides that. What DeepSpeed stores beside tensors
and plain values is listed here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from leeway.checkpoints.state import CheckpointError

FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def _deepspeed_types() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address, (_enum_member, "builtins.getattr")]


def _enum_member(enum: Any, name: Any) -> Enum:
    """In the place of getattr, which early releases of Python 3.11 store for a member of an enumeration."""
    if not (isinstance(enum, type) and issubclass(enum, Enum)):
        raise UnpicklingError(f"Unsupported global: GLOBAL getattr of {enum!r} and {name!r}")
    return enum[name]


@contextmanager
def weights_only(checkpoint: Path) -> Iterator[None]:
    """Every torch.load within loads tensors, plain values and a few types of DeepSpeed.

    Raises CheckpointError, which names the type, for a file that holds anything else; nothing of it is run.
    """
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_deepspeed_types()):
            yield
    except UnpicklingError as error:
        found = next((line for line in str(error).splitlines() if "GLOBAL" in line or "global" in line), "")
        raise CheckpointError(
            f"checkpoint {checkpoint} holds more than weights and was not loaded, because loading it could "
            f"run code: {found.strip() or error}; use one that this version of Leeway has written"
        ) from error
    finally:
        if before is None:
            del os.environ[FORCE]
        else:
            os.environ[FORCE] = before
