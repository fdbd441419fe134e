"""The section `sync`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from leeway.config.base import Section
from leeway.policies.shelf import check_policies


class SyncConfig(Section):
    """When samplers get new weights, and how far generation may run ahead of training."""

    ess_threshold: float | None = Field(default=0.5, gt=0, le=1)
    """Resync when the effective sample size of the lag ratio, as a share of n, falls below this; null:
    never."""
    ess_level: Literal["token", "sequence"] = "token"
    clip_fraction: float | None = Field(default=0.03, gt=0, lt=1)
    """Resync when the lag ratio of more than this share of tokens is clipped: clipped tokens have no
    gradient, which ESS does not see (docs/reproduction.md); null: never."""
    max_age: int | None = Field(default=16, ge=1)
    """Resync when the samplers' weights are this many optimiser steps old; 1: after every step."""
    every_n: int | None = Field(default=None, ge=1)
    """Resync after every n-th step, whatever is measured; null: never."""
    policies: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Further resync rules, for example from installed packages: name -> its settings."""
    max_lead: int = Field(default=1, ge=0)
    """Maximum number of batches generated ahead of the trainer; 0: synchronous."""
    verdict_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds that the trainer waits for a verdict before it applies the same policy itself."""
    commit_timeout_s: float = Field(default=120.0, gt=0)
    """Samplers that do not attest a new version within this time are fenced: the run continues without them
    until they have loaded it. A sampler gives up fetching a version when no part of it arrives for this
    long."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Seconds between the heartbeats of a sampler."""
    ticket_idle_s: float = Field(default=10.0, gt=0)
    """A ticket whose claim is not renewed for this long is taken over by another sampler. A sampler renews
    its claims with every heartbeat, as long as its engine draws tokens (`sampler.stall_timeout_s`)."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """No progress for this long ends the run with a diagnosis; a service that restarts meanwhile gets
    `sampler.start_timeout_s` more."""

    @field_validator("policies")
    @classmethod
    def _known_policies(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return check_policies(value)

    @model_validator(mode="after")
    def _heartbeat(self) -> SyncConfig:
        if self.ticket_idle_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"ticket_idle_s={self.ticket_idle_s} must be at least three heartbeats "
                f"(heartbeat_s={self.heartbeat_s}), or live samplers lose their tickets"
            )
        return self
