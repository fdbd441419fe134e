"""Checkpoints: DeepSpeed's state and Leeway's, made visible by one rename.

    checkpoints/.step-000010.tmp/     written by all ranks, synced to disk
    checkpoints/step-000010/          renamed into place: it exists completely or not at all
    checkpoints/latest                its name, replaced in one rename

The trainer draws no random numbers (dropout is off, the controller plans the batches), so there is no
generator state to save.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from leeway.checkpoints.damage import check_whole, record_files
from leeway.checkpoints.disk import replace_text, sync_tree
from leeway.checkpoints.retention import next_written, prune, set_aside
from leeway.checkpoints.state import (
    LATEST,
    STATE_FILE,
    CheckpointError,
    TrainState,
    checkpoint_name,
    read_state,
)
from leeway.errors import UsageError
from leeway_trainer.safe_loading import weights_only

if TYPE_CHECKING:
    from leeway_trainer.policy import Policy

ENGINE_TAG = "deepspeed"


def save_checkpoint(
    directory: Path,
    policy: Policy,
    state: TrainState,
    keep: int,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Write `directory`/step-<next_batch> atomically and keep the `keep` written last; called by all ranks.

    Sizes and checksums of its files are recorded in leeway.json. Rank 0 calls `check` before the checkpoint
    becomes visible and an old one is deleted; if it raises, neither happens.
    """
    name = checkpoint_name(state.next_batch)
    temporary, final = directory / f".{name}.tmp", directory / name
    ranks = policy.ranks
    if ranks.first:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    ranks.barrier()
    policy.engine.save_checkpoint(str(temporary), tag=ENGINE_TAG, save_latest=False)
    ranks.barrier()
    if ranks.first:
        state = state.model_copy(
            update={"written": next_written(directory), "files": record_files(temporary)}
        )
        (temporary / STATE_FILE).write_text(state.model_dump_json(indent=2) + "\n")
        sync_tree(temporary)
        check()
        if final.exists():
            final.rename(set_aside(final))
        temporary.rename(final)
        replace_text(directory / LATEST, name)
        prune(directory, keep)
    ranks.barrier()
    return final


def load_checkpoint(checkpoint: Path, policy: Policy) -> TrainState:
    """Restore weights and optimiser; called by all ranks.

    Raises CheckpointError when it is damaged (rank 0 reads every file) or holds more than weights, and
    UsageError when ranks, ZeRO stage or dtype differ from those that wrote it.
    """
    if policy.ranks.first:
        check_whole(checkpoint, contents=True)
    state = read_state(checkpoint)
    now = (policy.ranks.size, policy.config.zero_stage, policy.config.dtype)
    then = (state.ranks, state.zero_stage, state.dtype)
    if now != then:
        raise UsageError(
            f"checkpoint {checkpoint} was written with (trainer.ranks, zero_stage, dtype) = {then}, "
            f"this run has {now}; resume with the same values"
        )
    try:
        with weights_only(checkpoint):
            path, _ = policy.engine.load_checkpoint(str(checkpoint), tag=ENGINE_TAG)
    except (RuntimeError, ValueError, KeyError, OSError, EOFError) as error:
        raise UsageError(f"checkpoint {checkpoint} does not fit this model: {error}") from error
    if path is None:
        raise CheckpointError(
            f"checkpoint {checkpoint}: DeepSpeed found no state in {checkpoint / ENGINE_TAG}"
        )
    return state
