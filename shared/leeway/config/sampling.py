"""The section `sampling`."""

from __future__ import annotations

from pydantic import Field, model_validator

from leeway.config.base import Section


class SamplingConfig(Section):
    """How samplers draw tokens, and what they report about the distribution."""

    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits, in samplers and trainer alike."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1: off."""
    top_k: int = Field(default=0, ge=0)
    """0: off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Minimum probability relative to the most likely token; 0: off."""
    max_new_tokens: int = Field(default=24, ge=1)
    """Maximum number of tokens in a response."""
    head_tokens: int = Field(default=64, ge=0)
    """Maximum number of tokens of the sampler's distribution that are reported per position."""
    head_eps: float = Field(default=1e-3, ge=0, lt=1)
    """The head is the smallest set of top tokens with at least 1 - head_eps of the mass."""

    @property
    def truncated(self) -> bool:
        """True when some tokens of the vocabulary cannot be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @model_validator(mode="after")
    def _support_is_reported(self) -> SamplingConfig:
        if self.truncated and not 0 < self.top_k <= self.head_tokens:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}, min_p={self.min_p} truncate the distribution, and "
                f"the trainer can correct for that only if the sampler reports the whole support: set top_k "
                f"between 1 and head_tokens={self.head_tokens}, or turn all three off (1.0, 0, 0.0)"
            )
        return self
