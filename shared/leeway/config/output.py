"""The section `output`."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt

from leeway.config.base import Section, UserPath


class OutputConfig(Section):
    """What a run writes."""

    dir: UserPath | None = None
    """Output directory; null: runs/<name>-<time>."""
    save_model: bool = True
    """Write the final policy to DIR/model in Hugging Face format."""
    save_batches: list[NonNegativeInt] = Field(default_factory=list)
    """Steps whose batch is saved to DIR/batches with the weights on both sides (twice the size of the model
    per batch), for `leeway corrections compare`."""
