"""Models in Hugging Face format: the weights of a policy beside the model's other files as they came.

    python -m leeway_trainer.export RUN [--step N] [--out PATH]     from a checkpoint (`leeway export`)

Whatever can fail besides writing the weights is tried before the first step (`rehearse_export`), so that no
run trains to its end and fails there. The directory appears in one rename.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from leeway.checkpoints.find import find_checkpoint
from leeway.checkpoints.state import MODEL_FILES, CheckpointError, TrainState, read_state
from leeway.config.read_yaml import read_file
from leeway.errors import LeewayError, UsageError
from leeway.models.base import ModelError, first_few, model_directory
from leeway.models.files import copy_model_files, publish, share_weights
from leeway_trainer.checkpoint import ENGINE_TAG
from leeway_trainer.model import DTYPES
from leeway_trainer.policy import LM_PREFIX
from leeway_trainer.safe_loading import weights_only
from leeway_trainer.snapshot import wire_tensors

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from leeway_trainer.policy import Policy

MAX_SHARD = "5GB"


def export_model(directory: Path, policy: Policy, *, step: int) -> None:
    """Write the policy in Hugging Face format; called by all ranks.

    Rank 0 holds the whole model in CPU memory while it writes.
    """
    tensors = wire_tensors(policy, DTYPES[policy.config.dtype], step=step)
    write_model(directory, policy.model.lm, tensors, policy.model.source, keep=policy.ranks.first)
    policy.ranks.barrier()


def write_model(
    directory: Path,
    lm: PreTrainedModel,
    tensors: Iterable[tuple[str, Tensor]],
    source: str | Path,
    *,
    keep: bool,
) -> None:
    """Write `tensors` as a model like `lm`, in one rename, with the other files of `source`.

    Ranks that pass `keep` False only consume `tensors`.
    """
    state = {}
    for name, tensor in tensors:
        if keep:
            state[name] = tensor.detach().to("cpu", copy=True).contiguous()
    if not keep:
        return
    for name, buffer in persistent_buffers(lm).items():
        state.setdefault(name, buffer.detach().to("cpu", copy=True).contiguous())
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    copy_model_files(model_directory(source), temporary)
    save_weights(temporary, named_as_in_files(lm, state))
    publish(temporary, directory)


def save_weights(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Write `tensors` as safetensors, with an index if there are several files."""
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(tensors, directory, max_shard_size=MAX_SHARD, metadata={"format": "pt"})
    share_weights(directory)


def named_as_in_files(lm: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with the names and layout of the architecture's files; transformers fuses some on loading."""
    from transformers.core_model_loading import revert_weight_conversion

    named: dict[str, Tensor] = revert_weight_conversion(lm, dict(state))
    return named


def persistent_buffers(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Buffers that belong to the model's files. They are not trained."""
    stored = lm.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in lm.named_buffers() if name in stored}


def rehearse_export(lm: PreTrainedModel, source: str | Path, out: Path) -> None:
    """Do everything that an export to `out` does, with one tensor instead of all; nothing is left behind.

    Raises ModelError that names what fails.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=out) as scratch:
            directory = Path(scratch) / "model"
            directory.mkdir()
            copy_model_files(model_directory(source), directory)
            named_as_in_files(lm, {name: tensor.to("meta") for name, tensor in lm.named_parameters()})
            smallest = min(lm.named_parameters(), key=lambda named: named[1].numel())
            save_weights(directory, {smallest[0]: smallest[1].detach().clone()})
            publish(directory, Path(scratch) / "published")
    except LeewayError:
        raise
    except Exception as error:  # transformers' conversions and the file system
        raise ModelError(
            f"model {source} cannot be exported to {out}: {type(error).__name__}: {error}; to train without "
            "an export, set output.save_model=false"
        ) from error


# -- from a checkpoint -------------------------------------------------------------------------------------


def export_checkpoint(run: Path, step: int | None = None, out: Path | None = None) -> Path:
    """Write the model of a checkpoint in Hugging Face format, without GPU or Redis; returns its directory.

    `run`: the output directory of a run, its checkpoints, or one checkpoint. `out`: default RUN/model, or
    RUN/model-step-N if a step is given. Raises UsageError, CheckpointError for a damaged checkpoint.
    """
    checkpoint = find_checkpoint(run, step)
    state = read_state(checkpoint)
    source = checkpoint.parent / MODEL_FILES
    if not source.is_dir():
        source = model_directory(state.model)
    lm = build_empty_model(source, trust_remote_code=_code_is_trusted(checkpoint.parent.parent))
    tensors = read_weights(checkpoint, state, lm)
    target = out or _default_target(checkpoint, step)
    if target.exists() and not (target / "config.json").is_file() and any(target.iterdir()):
        raise UsageError(f"{target} exists and is not a model: choose another --out")
    write_model(target, lm, tensors.items(), source, keep=True)
    return target


def _default_target(checkpoint: Path, step: int | None) -> Path:
    run = checkpoint.parent.parent
    return run / ("model" if step is None else f"model-{checkpoint.name}")


def build_empty_model(source: Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The architecture of a model directory, without memory for its weights. Raises ModelError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            lm: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{source} describes no causal language model: {error}") from error
    lm.tie_weights()
    return lm


def _code_is_trusted(run: Path) -> bool:
    path = run / "config.yaml"
    return path.is_file() and read_file(path).get("model", {}).get("trust_remote_code") is True


def read_weights(checkpoint: Path, state: TrainState, lm: PreTrainedModel) -> dict[str, Tensor]:
    """Name in the Hugging Face model -> tensor in the run's dtype, on the CPU, tied weights once.

    Raises CheckpointError if tensors of the architecture are not in the checkpoint.
    """
    found = _read_engine(checkpoint, state)
    dtype, names = DTYPES[state.dtype], dict(lm.named_parameters()) | persistent_buffers(lm)
    kept: dict[str, Tensor] = {}
    for name, expected in names.items():
        tensor = found.get(f"{LM_PREFIX}{name}")
        if tensor is not None and tensor.shape == expected.shape:
            kept[name] = tensor.to(dtype) if isinstance(expected, torch.nn.Parameter) else tensor
    lacking = sorted(set(names) - set(kept))
    if lacking:
        raise CheckpointError(
            f"checkpoint {checkpoint} lacks {len(lacking)} of {len(names)} tensors of its model, or has them "
            f"in another shape: {first_few(lacking)}"
        )
    return kept


def _read_engine(checkpoint: Path, state: TrainState) -> dict[str, Any]:
    # Up to stage 2 rank 0's file holds all weights; stage 3 shards them, and DeepSpeed's own tool joins them.
    directory = checkpoint / ENGINE_TAG
    try:
        if state.zero_stage < 3:
            file = directory / "mp_rank_00_model_states.pt"
            with weights_only(checkpoint):
                states = torch.load(file, map_location="cpu", mmap=True)
            whole: dict[str, Any] = states["module"]
            return whole
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with weights_only(checkpoint):
            joined: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=ENGINE_TAG)
        return joined
    except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint}: its weights cannot be read: {type(error).__name__}: {error}"
        ) from error


def main(argv: list[str] | None = None) -> int:
    """The command line; prints the directory that was written."""
    parser = argparse.ArgumentParser("leeway export", description="A Hugging Face model from a checkpoint.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    try:
        print(export_checkpoint(args.run, args.step, args.out))
    except LeewayError as error:
        print(f"leeway: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
