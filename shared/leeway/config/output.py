"""The section `output`."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt

from leeway.config.base import Section


class OutputConfig(Section):
    """What a run leaves behind."""

    dir: str | None = None
    """Output directory; null: runs/<name>-<time>."""
    save_model: bool = True
    """Write the final policy in Hugging Face format to DIR/model."""
    save_batches: list[NonNegativeInt] = Field(default_factory=list)
    """Steps whose batch is kept in DIR/batches with the weights on both sides (twice the size of the model
    each), for `leeway corrections compare`."""
