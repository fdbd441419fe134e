"""The section `sync`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from leeway.config.base import Section


class SyncConfig(Section):
    """When samplers get new weights, and how far they may run ahead."""

    ess_threshold: float | None = Field(default=0.5, gt=0, le=1)
    """Resync when the effective sample size of the lag ratio (share of n) falls below this; null: never."""
    ess_level: Literal["token", "sequence"] = "token"
    """The ratio that the effective sample size is computed from: per token, or its product per response."""
    clip_fraction: float | None = Field(default=0.03, gt=0, lt=1)
    """Resync when PPO's clip of the lag ratio would zero more than this share of tokens. With a clipped ratio
    a run can stall without a low ESS (docs/reproduction.md); null: never."""
    max_age: int | None = Field(default=16, ge=1)
    """Resync when the sampler's weights are this many optimiser steps behind; 1: every step."""
    every_n: int | None = Field(default=None, ge=1)
    """Resync after every n-th step, regardless of the measurements."""
    max_lead: int = Field(default=1, ge=0)
    """Maximum number of batches generated ahead of the trainer; 0: synchronous."""
    verdict_timeout_s: float = Field(default=10.0, gt=0)
    """How long the trainer waits for the controller's decision before it applies the same policy itself."""
    commit_timeout_s: float = Field(default=120.0, gt=0)
    """Samplers that do not attest a new version within this time are fenced: other samplers take over their
    tickets, and they have to load the weights again."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Interval of the heartbeats of samplers."""
    ticket_idle_s: float = Field(default=10.0, gt=0)
    """A ticket without a heartbeat for this long is claimed by another sampler."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """The run ends with a diagnosis after this long without progress; a service that restarts meanwhile gets
    `sampler.start_timeout_s` in addition."""

    @model_validator(mode="after")
    def _heartbeat(self) -> SyncConfig:
        if self.ticket_idle_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"ticket_idle_s={self.ticket_idle_s} must be at least three heartbeats "
                f"(heartbeat_s={self.heartbeat_s}), or live samplers lose their tickets"
            )
        return self
