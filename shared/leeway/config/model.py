"""The section `model`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from leeway.config.base import Section


class ModelConfig(Section):
    """The policy."""

    name: str = Field(default="smollm2-135m-instruct", min_length=1)
    """`smollm2-135m-instruct`, `tiny`, a directory in Hugging Face format, or a hub id."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Only for `tiny`: sizes of the model and of its supervised warm-up."""
    max_length: int = Field(default=512, ge=8)
    """Longest prompt plus response, in tokens."""
    trust_remote_code: bool = False
    """Allow code that ships inside a model directory."""
