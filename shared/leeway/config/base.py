"""What all sections of RunConfig have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

Dtype = Literal["bfloat16", "float32"]


def _expand_home(path: str) -> str:
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError as exc:
        raise ValueError(f"{path}: {exc}; give the path without ~") from exc


UserPath = Annotated[str, AfterValidator(_expand_home)]
"""A path in which ~ is the home directory, as in a shell."""


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
