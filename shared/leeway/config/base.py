"""What all sections of RunConfig have in common."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Dtype = Literal["bfloat16", "float32"]


class Section(BaseModel):
    """Base of all sections: unknown keys and wrong types are rejected, values are immutable."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
