"""The section `model`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from leeway.config.base import Section


class ModelConfig(Section):
    """The policy model."""

    name: str = Field(default="smollm2-135m-instruct", min_length=1)
    """`smollm2-135m-instruct`, `tiny`, a directory in Hugging Face format, or a hub id."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Only for `tiny`: sizes of the model and settings of its supervised warm-up."""
    max_length: int = Field(default=512, ge=8)
    """Maximum length of prompt plus response, in tokens."""
    trust_remote_code: bool = False
    """Allow code that comes with the model."""
