"""Checkpoints: DeepSpeed's state and Leeway's, made visible by one rename.

    checkpoints/.step-000010.tmp/     written by all ranks, synced to disk
    checkpoints/step-000010/          renamed into place: it exists completely or not at all
    checkpoints/latest                its name, replaced in one rename

The trainer draws no random numbers (dropout is off, the controller plans the batches), so there is no
generator state to save.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leeway.errors import LeewayError, UsageError
from leeway_trainer.snapshot import wire_tensors

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from leeway_trainer.policy import Policy

log = logging.getLogger(__name__)
LATEST = "latest"
STATE_FILE = "leeway.json"
ENGINE_TAG = "deepspeed"


class CheckpointError(LeewayError):
    """A checkpoint could not be written or read."""


class TrainState(BaseModel):
    """What a resumed trainer must know besides weights and optimiser."""

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


def save_checkpoint(directory: Path, policy: Policy, state: TrainState, keep: int) -> Path:
    """Write `directory`/step-<next_batch> atomically and keep the newest `keep`; called by all ranks."""
    name = f"step-{state.next_batch:06d}"
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
        (temporary / STATE_FILE).write_text(state.model_dump_json(indent=2) + "\n")
        _sync_tree(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _replace_text(directory / LATEST, name)
        prune(directory, keep)
    ranks.barrier()
    return final


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that `path` refers to: itself, the latest in it, or the latest in its `checkpoints`.

    Raises UsageError when there is none.
    """
    given = Path(path)
    for place in (given, given / "checkpoints"):
        if (place / STATE_FILE).is_file():
            return place
        pointer = place / LATEST
        if pointer.is_file():
            found = place / pointer.read_text().strip()
            if (found / STATE_FILE).is_file():
                return found
    raise UsageError(f"no checkpoint in {given}: expected {STATE_FILE} or a file {LATEST!r} that names one")


def read_state(checkpoint: Path) -> TrainState:
    """The state of a checkpoint directory. Raises CheckpointError when it cannot be read."""
    try:
        return TrainState.model_validate_json((checkpoint / STATE_FILE).read_text())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"checkpoint {checkpoint}: {STATE_FILE} cannot be read: {error}") from error


def load_checkpoint(checkpoint: Path, policy: Policy) -> TrainState:
    """Restore weights and optimiser; called by all ranks.

    Raises UsageError when ranks, ZeRO stage or dtype differ from those that wrote it.
    """
    state = read_state(checkpoint)
    now = (policy.ranks.size, policy.config.zero_stage, policy.config.dtype)
    then = (state.ranks, state.zero_stage, state.dtype)
    if now != then:
        raise UsageError(
            f"checkpoint {checkpoint} was written with (trainer.ranks, zero_stage, dtype) = {then}, "
            f"this run has {now}; resume with the same values"
        )
    try:
        path, _ = policy.engine.load_checkpoint(str(checkpoint), tag=ENGINE_TAG)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UsageError(f"checkpoint {checkpoint} does not fit this model: {error}") from error
    if path is None:
        raise CheckpointError(
            f"checkpoint {checkpoint}: DeepSpeed found no state in {checkpoint / ENGINE_TAG}"
        )
    return state


def prune(directory: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and unfinished ones."""
    done = sorted(p for p in directory.glob("step-*") if p.is_dir())
    for old in [*done[:-keep], *directory.glob(".step-*.tmp")]:
        shutil.rmtree(old, ignore_errors=True)


def export_model(
    directory: Path, policy: Policy, source: str, *, step: int, trust_remote_code: bool = False
) -> None:
    """Write the policy and its tokenizer in Hugging Face format; called by all ranks.

    Rank 0 holds the whole model in CPU memory while it writes.
    """
    first = policy.ranks.first
    dtype = torch.bfloat16 if policy.config.dtype == "bfloat16" else torch.float32
    write_model(directory, policy.model.lm, wire_tensors(policy, dtype, step=step), keep=first)
    if first:
        _save_tokenizer(directory, source, trust_remote_code)
    policy.ranks.barrier()


def write_model(
    directory: Path, lm: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]], *, keep: bool
) -> None:
    """Write `tensors` as a model like `lm` in Hugging Face format; other ranks pass `keep` False and
    only consume `tensors`.
    """
    state = {}
    for name, tensor in tensors:
        if keep:
            state[name] = tensor.detach().to("cpu", copy=True).contiguous()
    if keep:
        directory.mkdir(parents=True, exist_ok=True)
        lm.save_pretrained(directory, state_dict=state)


def _save_tokenizer(directory: Path, source: str, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        log.warning("the model is saved without a tokenizer: none can be loaded from %s (%s)", source, error)
        return
    tokenizer.save_pretrained(directory)


def _sync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n")
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)
