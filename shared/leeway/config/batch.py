"""The section `batch`."""

from __future__ import annotations

from pydantic import Field

from leeway.config.base import Section


class BatchConfig(Section):
    """The responses of one optimiser step."""

    prompts: int = Field(default=16, ge=1)
    """Number of prompts in a batch."""
    group_size: int = Field(default=4, ge=1)
    """Number of responses per prompt."""
    order_seed: int | None = Field(default=None, ge=0, lt=2**31)
    """Seed of the order of the prompts; null: the run's `seed`. Runs with the same `order_seed` and different
    `seed` draw different responses to the same prompts."""

    @property
    def size(self) -> int:
        """Responses in a batch."""
        return self.prompts * self.group_size
