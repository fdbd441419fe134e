"""The files of a prepared model: readable, complete, of the sizes that the configuration says."""

from __future__ import annotations

from leeway.findings import Finding
from leeway_host.preflight.site import ModelFacts, Site, read_header, weight_files
from leeway_host.preflight.sizes import show_size

CHECK = "model"


def check_files(site: Site) -> list[Finding]:
    assert site.model is not None
    return [*judge_length(site.model, site.config.model.max_length), *check_embedding(site.model)] or [
        Finding("ok", CHECK, describe_model(site.model))
    ]


def describe_model(model: ModelFacts) -> str:
    """`Qwen3ForCausalLM, 0.43 M parameters, 1 MiB in /.../tiny-...`"""
    names = ", ".join(model.config.get("architectures") or [str(model.config.get("model_type", "unknown"))])
    size = show_size(model.weight_bytes)
    return f"{names}, {model.parameters / 1e6:.2f} M parameters, {size} in {model.directory}"


def judge_length(model: ModelFacts, max_length: int) -> list[Finding]:
    """model.max_length against the positions that the model was built for."""
    positions = model.text_config.get("max_position_embeddings")
    if not isinstance(positions, int) or max_length <= positions:
        return []
    text = f"model.max_length={max_length} is above the model's max_position_embeddings={positions}"
    return [Finding("error", CHECK, text, f"set model.max_length to at most {positions}")]


def check_embedding(model: ModelFacts) -> list[Finding]:
    """The rows of the embedding against vocab_size, where the embedding has the usual name."""
    vocabulary = model.text_config.get("vocab_size")
    for path in weight_files(model.directory):
        for name, tensor in read_header(path).items():
            if name.endswith("embed_tokens.weight") and tensor["shape"][0] != vocabulary:
                text = f"{name} has {tensor['shape'][0]} rows, config.json says vocab_size={vocabulary}"
                return [Finding("error", CHECK, text, "correct config.json, or use the matching weights")]
    return []
