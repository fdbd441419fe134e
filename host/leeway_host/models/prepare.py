"""From `model.name` to a directory."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from leeway.config import ModelConfig, TaskConfig
from leeway.models.base import CONFIG, GENERATION_CONFIG, ModelError, first_few, read_json
from leeway.models.files import absent_files
from leeway.models.tensors import check_tensors
from leeway.models.tokenizer import load_tokenizer
from leeway.models.tokens import check_tokens
from leeway_host.models.base import Progress, default_cache_dir, is_model_dir, quiet_libraries

ADAPTER = "adapter_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
BUILT_IN = ("smollm2-135m-instruct", "tiny")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def _silent(_: str) -> None:
    pass


def prepare_model(
    config: ModelConfig,
    cache_dir: str | Path | None = None,
    *,
    task: TaskConfig | None = None,
    seed: int = 0,
    progress: Progress = _silent,
    tokenizer_only: bool = False,
) -> Path:
    """A directory with configuration, tokenizer and safetensors of the model that `config` names.

    Models that are built here are cached under `cache_dir` (default: `default_cache_dir()`). `task` and
    `seed` matter only for `tiny`, which is warmed up on that task. `progress` receives short lines of text.
    `tokenizer_only` skips the weights of a model on the hub, and does not look at those of a directory.
    Raises ModelError that names the model and the reason, also for tensors that are missing, unexpected or of
    the wrong shape, and for tokens without a row in the embedding.
    """
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir)
    try:
        return _prepare(config, cache, task, seed, progress, tokenizer_only)
    except OSError as error:
        raise ModelError(f"model.name {config.name}: {error} (the cache is {cache})") from error


def _prepare(
    config: ModelConfig,
    cache: Path,
    task: TaskConfig | None,
    seed: int,
    progress: Progress,
    tokenizer_only: bool,
) -> Path:
    if config.params and config.name != "tiny":
        raise ModelError(f"model.params is only for the model tiny; model.name is {config.name!r}")
    if config.name == "smollm2-135m-instruct":
        from leeway_host.models.smollm2 import prepare_smollm2

        return prepare_smollm2(cache, progress)
    if config.name == "tiny":
        from leeway_host.models.tiny import prepare_tiny

        if task is None:
            raise ModelError("model.name tiny needs a task, because it is warmed up on the task's items")
        return prepare_tiny(config, task, seed, cache, progress)
    return _find_pretrained(config, progress, tokenizer_only)


def _find_pretrained(config: ModelConfig, progress: Progress, tokenizer_only: bool) -> Path:
    name = config.name
    try:
        directory = Path(name).expanduser()
    except RuntimeError as error:
        raise ModelError(f"model.name: {name}: {error}; give the path without ~") from error
    if directory.is_dir():
        return check_model_dir(directory, config.trust_remote_code, weights=not tokenizer_only)
    if directory.is_file():
        raise ModelError(f"model.name: {name} is a file; expected the directory that holds the model")
    if name.startswith(("/", ".", "~")):
        raise ModelError(f"model.name: {name} is not a directory (looked in {Path.cwd()})")
    if not _HUB_ID.fullmatch(name):
        close = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ModelError(
            f"model.name: {name!r} is neither built in nor a directory; {hint}expected "
            f"{', '.join(BUILT_IN)}, a directory in Hugging Face format, or a hub id such as Qwen/Qwen3-0.6B"
        )
    directory = _download(name, progress, tokenizer_only)
    return directory if tokenizer_only else check_model_dir(directory, config.trust_remote_code, weights=True)


def check_model_dir(directory: Path, trust_remote_code: bool = False, *, weights: bool = True) -> Path:
    """The resolved directory of a model that samplers and trainer can load. Raises ModelError.

    Reads headers and configurations, no weights; without `weights` not even those headers.
    """
    absent = absent_files(directory)
    if absent:
        raise ModelError(f"model.name: {directory} is incomplete: {first_few(absent)}; download it again")
    if (directory / ADAPTER).is_file():
        raise ModelError(
            f"model.name: {directory} has {ADAPTER}: an adapter (LoRA) is not a model, and would be ignored "
            "beside one; merge it into its base model (merge_and_unload of PEFT) and save that"
        )
    if not (directory / CONFIG).is_file():
        raise ModelError(
            f"model.name: {directory} has no {CONFIG}, so it is not a model in Hugging Face format"
            + _nearest_model(directory)
        )
    if not is_model_dir(directory):
        raise ModelError(
            f"model.name: {directory} has no *.safetensors; convert its weights to that format first"
        )
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"model.name: {directory} has no tokenizer ({', '.join(TOKENIZER_FILES)})")
    for file in (CONFIG, GENERATION_CONFIG):
        read_json(directory / file)
    with quiet_libraries():
        if weights:
            check_tensors(directory, trust_remote_code=trust_remote_code)
        check_tokens(directory, _load_tokenizer(directory, trust_remote_code))
    return directory.resolve()


def _nearest_model(directory: Path) -> str:
    """A remark that names a model in a directory below: a folder of the Hub's cache, a trainer's output."""
    found = sorted([*directory.glob(f"*/{CONFIG}"), *directory.glob(f"snapshots/*/{CONFIG}")])
    return f"; did you mean {found[-1].parent}?" if found else ""


def _load_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    try:
        return load_tokenizer(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files raise anything
        text = " ".join(str(error).split())[:400]
        raise ModelError(f"model.name: {directory} has no usable tokenizer: {text}") from error


def _download(hub_id: str, progress: Progress, tokenizer_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    progress(f"{hub_id}: downloading from the Hugging Face hub")
    patterns = ["*.json", "*.txt", "*.model", "*.jinja"]
    if not tokenizer_only:
        patterns.append("*.safetensors")
    try:
        path = snapshot_download(hub_id, allow_patterns=patterns, etag_timeout=10)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model.name: {hub_id!r} is not a local directory and cannot be downloaded from the "
            f"Hugging Face hub ({type(error).__name__}: {reason})"
        ) from error
    return Path(path)
