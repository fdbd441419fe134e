"""`python -m leeway_trainer.trial`: the trainer's model before a run, and the export that ends one.

Tried: the architecture, the logits (which the trainer computes itself), one prompt forward when the model is
small, and everything that the export writes except weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leeway.config import RunConfig
from leeway.errors import UsageError
from leeway.findings import Finding, run_trial
from leeway.process import limit_threads

CHECK, EXPORT = "trainer", "export"
SMALL_BYTES = 1 << 30
"""Size of the weights up to which the model is loaded for a forward pass."""


def try_trainer(config: RunConfig, model: str) -> Iterator[Finding | str]:
    """Export first, because it takes less; then the model."""
    limit_threads(config.trainer.cpu_threads)
    directory = Path(model)
    yield "exporting everything except weights"
    yield try_export(config, directory)
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if size > SMALL_BYTES:
        yield "building the architecture without weights"
        yield try_architecture(config, directory)
    else:
        yield "loading the model"
        yield try_forward(config, directory)


def try_export(config: RunConfig, directory: Path) -> Finding:
    """Write configuration, generation configuration and tokenizer to a temporary directory."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    trust = config.model.trust_remote_code
    with tempfile.TemporaryDirectory(prefix="leeway-export-") as target:
        try:
            AutoConfig.from_pretrained(directory, trust_remote_code=trust).save_pretrained(target)
            if (directory / "generation_config.json").is_file():
                GenerationConfig.from_pretrained(directory).save_pretrained(target)
            AutoTokenizer.from_pretrained(directory, trust_remote_code=trust).save_pretrained(target)
        except Exception as exc:  # noqa: BLE001 (libraries raise many types, also from a model's own code)
            text = f"the model could not be saved after training: {type(exc).__name__}: {exc}"
            return Finding("error", EXPORT, text, f"correct the file in {directory}")
        files = len(list(Path(target).iterdir()))
    return Finding("ok", EXPORT, f"{files} files beside the weights can be written")


def try_architecture(config: RunConfig, directory: Path) -> Finding:
    """Build the model on the meta device: it has no weights, but its layers are those of the trainer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = config.model.trust_remote_code
    settings: Any = AutoConfig.from_pretrained(directory, trust_remote_code=trust)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(settings, trust_remote_code=trust, attn_implementation="sdpa")
    if lm.get_output_embeddings() is None:
        text = f"{type(lm).__name__} has no output layer that the trainer can read"
        return Finding("error", CHECK, text, "use a causal language model")
    text = f"{type(lm).__name__} is a causal language model; it is too large to try a forward pass here"
    return Finding("ok", CHECK, text)


def try_forward(config: RunConfig, directory: Path) -> Finding:
    """Load the model as the trainer does, which compares its logits, and score the first prompt.

    Raises UsageError for a model that the trainer cannot load.
    """
    import torch

    from leeway_trainer.model import DTYPES, load_policy_model

    model = load_policy_model(
        directory,
        dtype=DTYPES[config.trainer.dtype],
        chunk_tokens=config.trainer.logits_chunk_tokens,
        trust_remote_code=config.model.trust_remote_code,
    )
    ids = first_prompt(config, directory)
    rows = model.head.weight.shape[0]
    if max(ids) >= rows:
        raise UsageError(f"the first prompt contains token id {max(ids)}, the output layer has {rows} rows")
    with torch.no_grad():
        logits = model.lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
    name = type(model.lm).__name__
    if not bool(torch.isfinite(logits).all()):
        text = f"{name}: the first prompt gives logits that are not finite in {config.trainer.dtype}"
        return Finding("error", CHECK, text, "try trainer.dtype=float32, or another model")
    return Finding("ok", CHECK, f"{name}: the first prompt of {len(ids)} tokens gives finite logits")


def first_prompt(config: RunConfig, directory: Path) -> list[int]:
    """Token ids of the task's first item."""
    from transformers import AutoTokenizer

    from leeway.tasks import encode_prompt, load_task

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=config.model.trust_remote_code)
    return encode_prompt(tokenizer, load_task(config.task).item(0), config.task)


if __name__ == "__main__":
    run_trial(CHECK, try_trainer)
