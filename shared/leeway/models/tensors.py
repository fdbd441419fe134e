"""The tensors of a model directory against its architecture, from headers alone.

transformers fills what is missing with random numbers and skips what it does not know, with one line in a
log. Here both are errors, and so are shapes and types that do not fit. Tied weights may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leeway.models.base import CONFIG, ModelError, first_few, read_json, text_config

INDEX = "model.safetensors.index.json"
TRAINABLE = ("BF16", "F16", "F32", "F64")
"""Types of weights in safetensors headers; anything else is quantised."""
SAMPLE_ROWS = 64


@dataclass(frozen=True)
class Stored:
    """A tensor as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]
    file: str = ""


def read_headers(directory: Path) -> dict[str, Stored]:
    """Name -> type and shape of every tensor in the weight files that transformers loads.

    Raises ModelError for a file that cannot be read, is missing, or lacks a tensor of the index.
    """
    from safetensors import SafetensorError, safe_open

    wanted = _weight_map(directory)
    single = directory / "model.safetensors"
    names = sorted(set(wanted.values())) if wanted and not single.is_file() else []
    paths = [directory / name for name in names] or sorted(directory.glob("*.safetensors"))
    found: dict[str, Stored] = {}
    for path in paths:
        try:
            with safe_open(path, framework="np") as weights:
                for name in weights.keys():  # noqa: SIM118 (it is no dict)
                    part = weights.get_slice(name)
                    found[name] = Stored(part.get_dtype(), tuple(part.get_shape()), path.name)
        except FileNotFoundError as error:
            raise ModelError(f"model {directory}: {path.name}, which {INDEX} names, is missing") from error
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model {directory}: {path.name} cannot be read: {error}") from error
    lost = sorted(set(wanted) - set(found)) if names else []
    if lost:
        raise ModelError(
            f"model {directory}: {len(lost)} of {len(wanted)} tensors that {INDEX} names are not in its "
            f"files: {first_few(lost)}"
        )
    return found


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensor -> file according to the index, {} if there is none. Raises ModelError for a damaged index."""
    found = read_json(directory / INDEX).get("weight_map") or {}
    if isinstance(found, dict) and all(isinstance(file, str) for file in found.values()):
        return found
    raise ModelError(
        f"model {directory}: weight_map in {INDEX} must map names of tensors to names of files; download the "
        "file again"
    )


def loading_problems(info: Mapping[str, Any]) -> list[str]:
    """What transformers' loading info (`output_loading_info=True`) reports that must not be trained on."""
    problems = []
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing:
        problems.append(f"{_count(missing, 'tensor')} missing, which would be random: {first_few(missing)}")
    if unexpected:
        problems.append(
            f"{_count(unexpected, 'tensor')} not part of the architecture, and would be ignored: "
            f"{first_few(unexpected)}"
        )
    shapes = [
        f"{name} is {list(stored)}, expected {list(expected)}"
        for name, stored, expected in sorted(info["mismatched_keys"])
    ]
    if shapes:
        problems.append(f"{_count(shapes, 'tensor')} of the wrong shape: {first_few(shapes)}")
    problems += [" ".join(str(text).split()) for text in info.get("error_msgs") or []]
    return problems


def dtype_problems(stored: Mapping[str, Stored], parameters: Iterable[str]) -> list[str]:
    """Weights that are stored as integers or in a quantised type. `parameters`: names in the model."""
    known = set(parameters)
    known |= {name.split(".", 1)[1] for name in known if "." in name}  # files of the model without its head
    wrong = [
        f"{name} is {tensor.dtype}"
        for name, tensor in sorted(stored.items())
        if name in known and tensor.dtype not in TRAINABLE
    ]
    if not wrong:
        return []
    return [f"{_count(wrong, 'weight')} not stored as {', '.join(TRAINABLE)}: {first_few(wrong)}"]


def tied_problems(directory: Path, model: Any, stored: Mapping[str, Stored]) -> list[str]:
    """An output layer that is stored beside the embedding it is tied to, with other values.

    transformers would train both, and vLLM would run the embedding alone.
    """
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return []
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [f"{name}.weight" for name, module in model.named_modules() if module in layers]
    if len(names) != 2 or not all(name in stored for name in names) or _equal_rows(directory, names, stored):
        return []
    return [
        f"{' and '.join(sorted(names))} differ, but tie_word_embeddings is true in {CONFIG}: set it to "
        "false, or delete the output layer from the weights"
    ]


def _equal_rows(directory: Path, names: list[str], stored: Mapping[str, Stored]) -> bool:
    """True if two matrices have the same rows at the beginning, in the middle and at the end."""
    import torch
    from safetensors import safe_open

    samples = []
    for name in names:
        rows = stored[name].shape[0]
        with safe_open(directory / stored[name].file, framework="pt") as weights:
            part = weights.get_slice(name)
            starts = (0, rows // 2, max(0, rows - SAMPLE_ROWS))
            samples.append(torch.cat([part[start : start + SAMPLE_ROWS] for start in starts]))
    return torch.equal(*samples)


def refuse(directory: str | Path, problems: list[str]) -> None:
    """Raise ModelError that lists the problems, if there are any."""
    if problems:
        raise ModelError(
            f"model {directory} does not fit its config.json: {'; '.join(problems)}. Use the complete model, "
            "saved for this architecture"
        )


def check_tensors(directory: Path, *, trust_remote_code: bool = False) -> None:
    """Compare the weight files of `directory` with its architecture, without reading a weight.

    Takes a few seconds, most of them to import transformers. Raises ModelError with the names of tensors.
    """
    config = read_json(directory / CONFIG)
    quantised = config.get("quantization_config") or text_config(config).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "?") if isinstance(quantised, Mapping) else quantised
        raise ModelError(
            f"model {directory} is quantised (quantization_config.quant_method {method!r} in config.json): "
            "its weights cannot be trained; use the original weights"
        )
    stored = read_headers(directory)
    model, info = _load_without_data(directory, trust_remote_code)
    names = [name for name, _ in model.named_parameters()]
    problems = [*loading_problems(info), *dtype_problems(stored, names)]
    refuse(directory, problems or tied_problems(directory, model, stored))


def _load_without_data(directory: Path, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(directory),
            device_map="meta",
            dtype=torch.bfloat16,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # configurations and code of others raise anything
        text = " ".join(str(error).split())[:400]
        raise ModelError(
            f"model {directory} is not a causal language model that can be loaded: "
            f"{type(error).__name__}: {text}"
        ) from error
    return model, info


def _count(items: list[str], noun: str) -> str:
    return f"{len(items)} {noun} is" if len(items) == 1 else f"{len(items)} {noun}s are"
