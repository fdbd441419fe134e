"""`python -m leeway_trainer.trial`: the trainer's model before a run, and the export that ends one.

Tried: the architecture, the logits (which the trainer computes itself), one prompt forward when the model is
small, and everything that the export writes except weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leeway.config import RunConfig
from leeway.errors import UsageError
from leeway.findings import Finding, run_trial
from leeway.models.base import ModelError
from leeway.models.tokenizer import load_tokenizer
from leeway.process import limit_threads

if TYPE_CHECKING:
    from leeway_trainer.model import PolicyModel

CHECK, EXPORT = "trainer", "export"
SMALL_BYTES = 1 << 30
"""Size of the weights up to which the model is loaded for a forward pass."""


def try_trainer(config: RunConfig, model: str) -> Iterator[Finding | str]:
    """The model as far as its size allows, and the export that ends the run.

    Raises UsageError for a model that the trainer cannot load.
    """
    limit_threads(config.trainer.cpu_threads)
    directory = Path(model)
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if size > SMALL_BYTES:
        yield "building the architecture without weights"
        yield try_architecture(config, directory)
        return
    yield "loading the model"
    from leeway_trainer.model import DTYPES, load_policy_model

    policy = load_policy_model(
        directory,
        dtype=DTYPES[config.trainer.dtype],
        chunk_tokens=config.trainer.logits_chunk_tokens,
        trust_remote_code=config.model.trust_remote_code,
    )
    yield "scoring the first prompt"
    yield try_forward(config, directory, policy)
    if config.output.save_model:
        yield "exporting one tensor and everything except weights"
        yield try_export(policy.lm, directory)


def try_export(lm: Any, directory: Path) -> Finding:
    """The export to a temporary directory; an error names what fails."""
    from leeway_trainer.export import rehearse_export

    with tempfile.TemporaryDirectory(prefix="leeway-export-") as target:
        try:
            rehearse_export(lm, directory, Path(target) / "out")
        except ModelError as exc:
            return Finding("error", EXPORT, str(exc), "correct the model directory")
    return Finding("ok", EXPORT, "one tensor and all files beside the weights can be written")


def try_architecture(config: RunConfig, directory: Path) -> Finding:
    """Layers without weights, and the files that an export copies. Raises ModelError."""
    from leeway.models.files import copy_model_files
    from leeway_trainer.export import build_empty_model

    lm = build_empty_model(directory, trust_remote_code=config.model.trust_remote_code)
    if lm.get_output_embeddings() is None:
        text = f"{type(lm).__name__} has no output layer that the trainer can read"
        return Finding("error", CHECK, text, "use a causal language model")
    with tempfile.TemporaryDirectory(prefix="leeway-export-") as target:
        copy_model_files(directory, Path(target))
    text = f"{type(lm).__name__} is a causal language model; it is too large to try a forward pass here"
    return Finding("ok", CHECK, text)


def try_forward(config: RunConfig, directory: Path, policy: PolicyModel) -> Finding:
    """The logits of the first prompt are finite."""
    import torch

    ids = first_prompt(config, directory)
    rows = policy.head.weight.shape[0]
    if max(ids) >= rows:
        raise UsageError(f"the first prompt contains token id {max(ids)}, the output layer has {rows} rows")
    with torch.no_grad():
        logits = policy.lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
    name = type(policy.lm).__name__
    if not bool(torch.isfinite(logits).all()):
        text = f"{name}: the first prompt gives logits that are not finite in {config.trainer.dtype}"
        return Finding("error", CHECK, text, "try trainer.dtype=float32, or another model")
    return Finding("ok", CHECK, f"{name}: the first prompt of {len(ids)} tokens gives finite logits")


def first_prompt(config: RunConfig, directory: Path) -> list[int]:
    """Token ids of the task's first item."""
    from leeway.tasks import encode_prompt, load_task

    tokenizer = load_tokenizer(directory, trust_remote_code=config.model.trust_remote_code)
    return encode_prompt(tokenizer, load_task(config.task).item(0), config.task)


if __name__ == "__main__":
    run_trial(CHECK, try_trainer)
