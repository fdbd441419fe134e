"""The header of each message: everything that is not an array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from leeway.errors import LeewayError

SCHEMA_VERSION = 2
EventLevel = Literal["info", "warning", "error"]


class MessageError(LeewayError):
    """An entry that is not what its stream promises; the text names the kind of entry and the fault."""


class Header(BaseModel):
    """Base of all headers."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
    schema_version: Literal[2] = 2
    traceparent: str | None = None
    """W3C trace context of the span that wrote the entry."""


@dataclass(frozen=True, order=True)
class Slot:
    """The place of one response in the run: response `index` to prompt `group` of batch `batch`."""

    batch: int
    group: int
    index: int


class SlotHeader(Header):
    """What a ticket and its rollout share: which response, under which weight version and configuration."""

    ticket_id: str
    epoch: int = Field(ge=0)
    version: int = Field(ge=0)
    batch: int = Field(ge=0)
    group: int = Field(ge=0)
    index: int = Field(ge=0)
    item: int = Field(ge=0)
    """Index of the item in the data set; the reward needs it."""
    config: str = ""
    """Digest of the configuration (`leeway.config.identity`) that it is drawn and scored under."""

    @property
    def slot(self) -> Slot:
        return Slot(self.batch, self.group, self.index)


class TicketHeader(SlotHeader):
    """An order for one response, fixed before anything is generated."""

    kind: Literal["ticket"] = "ticket"
    seed: int = Field(ge=0, lt=2**63)
    max_new_tokens: int = Field(ge=1)


class RolloutHeader(SlotHeader):
    """One response, drawn under a single weight version from its first token to its last."""

    kind: Literal["rollout"] = "rollout"
    sampler: str
    finish_reason: Literal["stop", "length"]
    reward: float
    reward_error: str | None = None
    spans: list[tuple[int, int, int]]
    """(start, end, weight version) over response tokens, as the engine reported them."""
    support_complete: bool = False
    """The head of every position covers the whole distribution that the token was drawn from."""
    digest: str = ""
    """`draw_digest` of what the engine drew; empty if the sampler computed none."""
    redraws: int = Field(default=0, ge=0)
    """Processes that began the response before and did not finish it."""
    generate_s: float = 0.0


class ReportHeader(Header):
    """What the trainer did."""

    kind: Literal["report"] = "report"
    event: Literal["started", "step", "resync_failed", "finished"]
    epoch: int = Field(ge=0)
    step: int = Field(ge=0)
    """For a `step` event the batch that was trained; otherwise the next batch."""
    version: int = Field(ge=0)
    """The version that samplers hold, before a resync that this report may cause."""
    age: int = Field(default=0, ge=0)
    """Optimiser steps that samplers are behind, after this step."""
    config: str = ""
    """Digest of the trainer's configuration."""
    metrics: dict[str, float | int | str | None] = Field(default_factory=dict)


class VerdictHeader(Header):
    """The controller's answer to a step report."""

    kind: Literal["verdict"] = "verdict"
    epoch: int = Field(ge=0)
    step: int = Field(ge=0)
    action: Literal["continue", "resync"]
    reason: str | None = None
    """Reason of the rule that asked for the resync (`leeway.policies`); None for `continue`."""


class EventHeader(Header):
    """Something a person wants to know: a failure, a claim, a fence, a restart."""

    kind: Literal["event"] = "event"
    level: EventLevel = "info"
    source: str
    name: str
    text: str
    data: dict[str, Any] = Field(default_factory=dict)
