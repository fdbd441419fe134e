"""The section `checks`."""

from __future__ import annotations

from pydantic import Field

from leeway.config.base import Section


class ChecksConfig(Section):
    """The infrastructure checks (docs/checks.md)."""

    enabled: bool = True
    """Let the controller check every batch during the run."""
    sample_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of responses whose distributions and tokens are checked."""
    probe_draws: int = Field(default=512, ge=0)
    """Number of one-token draws from a fixed prompt after a resync, at most once a minute; 0: none."""
    self_prefix_responses: int = Field(default=64, ge=0)
    """Number of responses that are scored with the old and the new weights at a resync; 0: none."""
    self_prefix_every: int = Field(default=8, ge=1)
    """Minimum number of steps between two such measurements."""
