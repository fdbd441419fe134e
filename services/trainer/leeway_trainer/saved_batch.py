"""The batch of one step on disk, with theta and theta_s, for `leeway corrections compare`.

batches/step-0003/rollouts.bin     what the samplers sent
                  theta/           the policy before the step, Hugging Face format
                  theta_s/         the weights that the batch was drawn under
                  config.yaml      the run's configuration
                  batch.json       step, age and version; written last: without it the directory is incomplete
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from leeway.config import RunConfig
from leeway.config.load import dump_config, load_config
from leeway.errors import UsageError
from leeway.messages import MessageError, Rollout, pack, unpack
from leeway_trainer.export import write_model
from leeway_trainer.model import DTYPES
from leeway_trainer.snapshot import wire_tensors

if TYPE_CHECKING:
    from leeway_trainer.policy import Policy
    from leeway_trainer.snapshot import Snapshot


class BatchInfo(BaseModel):
    """Where in its run the batch was saved."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal[1] = 1
    step: int = Field(ge=0)
    age: int = Field(ge=0)
    """Optimiser steps between the weights that the batch was drawn under and the policy."""
    version: int = Field(ge=0)


def save_batch(
    batches: Path,
    policy: Policy,
    snapshot: Snapshot,
    rollouts: Sequence[Rollout],
    config: RunConfig,
    info: BatchInfo,
) -> Path:
    """Write the batch of step `info.step`; called by all ranks before the step. Returns its directory."""
    directory = batches / f"step-{info.step:04d}"
    dtype = DTYPES[config.trainer.dtype]
    first = policy.ranks.first
    if first:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "batch.json").unlink(missing_ok=True)
        (directory / "rollouts.bin").write_bytes(pack(list(rollouts)))
        (directory / "config.yaml").write_text(dump_config(config))

    def sides() -> Iterator[tuple[str, Iterator[tuple[str, Tensor]]]]:
        yield "theta", wire_tensors(policy, dtype, step=info.step)
        yield "theta_s", snapshot.tensors()

    for name, tensors in sides():
        write_model(directory / name, policy.model.lm, tensors, policy.model.source, keep=first)
    if first:
        (directory / "batch.json").write_text(info.model_dump_json() + "\n")
    policy.ranks.barrier()
    return directory


def find_batch(path: Path) -> Path:
    """The saved batch at `path`, or the newest one of the run there. Raises UsageError."""
    if (path / "batch.json").is_file():
        return path
    found = sorted(file.parent for file in path.glob("batches/step-*/batch.json"))
    if not found:
        raise UsageError(
            f"{path} holds no saved batch; a run saves the batches of the steps in output.save_batches, "
            "for example: leeway run examples/tiny.yaml --set output.save_batches=[7]"
        )
    return found[-1]


def load_batch(directory: Path, sets: Sequence[str] = ()) -> tuple[BatchInfo, list[Rollout], RunConfig]:
    """Step, rollouts, and the run's configuration updated with `sets`. Raises UsageError."""
    try:
        info = BatchInfo.model_validate_json((directory / "batch.json").read_text())
        rollouts = unpack((directory / "rollouts.bin").read_bytes())
    except (OSError, ValidationError, MessageError) as error:
        raise UsageError(f"saved batch {directory} cannot be read: {error}") from error
    config = load_config(directory / "config.yaml", sets, environ={})
    size = config.batch.group_size
    slots = [divmod(i, size) for i in range(config.batch.size)]
    if [(rollout.header.group, rollout.header.index) for rollout in rollouts] != slots:
        raise UsageError(
            f"saved batch {directory} holds {len(rollouts)} responses, expected batch.prompts="
            f"{config.batch.prompts} groups of batch.group_size={size}: do not change these settings"
        )
    return info, rollouts, config
