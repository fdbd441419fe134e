"""Loading a model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leeway.models.base import read_json
from leeway.models.files import OURS

GENERIC = "TokenizersBackend"
"""tokenizer_class of a tokenizer whose behaviour is completely described by its tokenizer.json."""


def load_tokenizer(
    model: str | Path, *, trust_remote_code: bool = False, local_files_only: bool = False
) -> Any:
    """The tokenizer of a directory or hub id, as transformers' AutoTokenizer returns it.

    Raises what transformers raises, mostly OSError and ValueError.
    """
    directory = Path(model)
    if (directory / OURS).is_file() and _class_name(directory) == GENERIC:
        # Saved by Leeway. Finding its class by AutoTokenizer would import torch: 7 s and 300 MiB for a
        # controller.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(model), trust_remote_code=trust_remote_code, local_files_only=local_files_only
    )


def _class_name(directory: Path) -> object:
    return read_json(directory / "tokenizer_config.json").get("tokenizer_class")
