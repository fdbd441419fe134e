"""The kinds of messages: a header and the arrays that belong to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from leeway.messages.checks import check_rollout, check_ticket
from leeway.messages.headers import (
    EventHeader,
    Header,
    ReportHeader,
    RolloutHeader,
    TicketHeader,
    VerdictHeader,
)


@dataclass(frozen=True)
class Message:
    """Base of messages; subclasses set `header_class` and `arrays` (name -> dtype)."""

    header_class: ClassVar[type[Header]]
    arrays: ClassVar[Mapping[str, str]] = {}

    def check(self) -> None:
        """Raise MessageError if header and arrays contradict each other."""


@dataclass(frozen=True)
class Ticket(Message):
    """An order for one response. `prompt_ids`: i32 [P], P >= 1."""

    header_class: ClassVar[type[Header]] = TicketHeader
    arrays: ClassVar[Mapping[str, str]] = {"prompt_ids": "<i4"}
    header: TicketHeader
    prompt_ids: NDArray[np.int32]

    def check(self) -> None:
        check_ticket(self)


@dataclass(frozen=True)
class Rollout(Message):
    """One response of T tokens.

    `prompt_ids` i32 [P]; `response_ids` i32 [T]; `logp` f32 [T], log mu of each drawn token in nats;
    the ragged head of mu: `head_offsets` i32 [T+1], `head_ids` i32 [M], `head_logp` f32 [M].
    """

    header_class: ClassVar[type[Header]] = RolloutHeader
    arrays: ClassVar[Mapping[str, str]] = {
        "prompt_ids": "<i4",
        "response_ids": "<i4",
        "logp": "<f4",
        "head_offsets": "<i4",
        "head_ids": "<i4",
        "head_logp": "<f4",
    }
    header: RolloutHeader
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    logp: NDArray[np.float32]
    head_offsets: NDArray[np.int32]
    head_ids: NDArray[np.int32]
    head_logp: NDArray[np.float32]

    def check(self) -> None:
        check_rollout(self)


@dataclass(frozen=True)
class Report(Message):
    """What the trainer did."""

    header_class: ClassVar[type[Header]] = ReportHeader
    header: ReportHeader


@dataclass(frozen=True)
class Verdict(Message):
    """The controller's answer to a step report."""

    header_class: ClassVar[type[Header]] = VerdictHeader
    header: VerdictHeader


@dataclass(frozen=True)
class Event(Message):
    """Something a person wants to know. Written and read by `leeway.events`."""

    header_class: ClassVar[type[Header]] = EventHeader
    header: EventHeader


AnyMessage = Ticket | Rollout | Report | Verdict | Event
