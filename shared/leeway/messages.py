"""What travels over the streams: a small JSON header and raw little-endian arrays. Never pickle.

An entry of a Redis stream has the field `h` (JSON of a pydantic header) and one field per array, `a:<name>`.
Array names and types belong to the message class, so that a decoder never takes a type from the wire.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leeway.errors import LeewayError

SCHEMA_VERSION = 1
MAX_HEADER_BYTES = 1 << 20
"""Headers are small by design; a larger one is refused before it is parsed."""

Fields = dict[bytes, bytes]


class MessageError(LeewayError):
    """An entry that is not what its stream promises; the message names the entry's kind and the fault."""


class Header(BaseModel):
    """Base of all headers."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
    schema_version: Literal[1] = 1
    traceparent: str | None = None
    """W3C trace context of the span that wrote the entry."""


@dataclass(frozen=True, order=True)
class Slot:
    """The place of one response: response `index` to prompt `group` of batch `batch`."""

    batch: int
    group: int
    index: int


class SlotHeader(Header):
    """What a ticket and its rollout share: which response, under which version."""

    ticket_id: str
    epoch: int = Field(ge=0)
    version: int = Field(ge=0)
    batch: int = Field(ge=0)
    group: int = Field(ge=0)
    index: int = Field(ge=0)
    item: int = Field(ge=0)
    """Index of the data set's item, for the reward."""

    @property
    def slot(self) -> Slot:
        return Slot(self.batch, self.group, self.index)


class TicketHeader(SlotHeader):
    """Order for one response, fixed before anything is generated."""

    kind: Literal["ticket"] = "ticket"
    seed: int = Field(ge=0, lt=2**63)
    max_new_tokens: int = Field(ge=1)


class RolloutHeader(SlotHeader):
    """One response, wholly drawn under one weight version."""

    kind: Literal["rollout"] = "rollout"
    sampler: str
    finish_reason: Literal["stop", "length"]
    reward: float
    reward_error: str | None = None
    spans: list[tuple[int, int, int]]
    """(start, end, weight version) over response tokens, as the engine reported them."""
    support_complete: bool = False
    """The head of every position is the whole distribution that was drawn from."""
    digest: str = ""
    """`draw_digest` of what the engine drew; empty when the sampler made none."""
    generate_s: float = 0.0


class ReportHeader(Header):
    """What the trainer did."""

    kind: Literal["report"] = "report"
    event: Literal["started", "step", "resync_failed", "finished"]
    epoch: int = Field(ge=0)
    step: int = Field(ge=0)
    """`step`: the batch just trained; otherwise the next batch."""
    version: int = Field(ge=0)
    """The version that samplers hold, before a resync that this report may lead to."""
    age: int = Field(default=0, ge=0)
    """Optimiser steps that samplers are behind, after this step."""
    metrics: dict[str, float | int | str | None] = Field(default_factory=dict)


class VerdictHeader(Header):
    """The controller's answer to a step report."""

    kind: Literal["verdict"] = "verdict"
    epoch: int = Field(ge=0)
    step: int = Field(ge=0)
    action: Literal["continue", "resync"]
    reason: str | None = None


class EventHeader(Header):
    """Something a person wants to know: a failure, a claim, a fence, a restart."""

    kind: Literal["event"] = "event"
    level: Literal["info", "warning", "error"] = "info"
    source: str
    name: str
    text: str
    data: dict[str, Any] = Field(default_factory=dict)


class Probe(BaseModel):
    """Draws from one fixed prefix, compared with the distribution that was reported for it."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    request: int = 0
    """The newest request that this answers; the key `probe` counts them."""
    version: int = -1
    draws: int = 0
    chi2: float = 0.0
    dof: int = 0
    """Degrees of freedom; 0 when the distribution is too peaked to be tested."""
    example: str = ""
    """The token that is furthest off."""


class SamplerStatus(BaseModel):
    """A sampler's entry in the hash `samplers`: its heartbeat and what it attests."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    sampler: str
    heartbeat: float
    """Unix time, seconds."""
    ready: bool = False
    epoch: int = -1
    version: int = -1
    digest: str = ""
    """Digest of the weights that it holds."""
    inflight: int = 0
    busy_s: float = 0.0
    """Seconds with at least one response in flight, since its start."""
    uptime_s: float = 0.0
    tokens: int = 0
    """Tokens generated since its start."""
    tokens_voided: int = 0
    """Of these, tokens of responses that became void."""
    tickets: int = 0
    """Responses published since its start."""
    stage_s: float = 0.0
    """Seconds that reading and verifying the last version took, beside the running engine."""
    pause_s: float = 0.0
    """Seconds that generation stood still while it was loaded."""
    stuck: tuple[int, int] | None = None
    """(epoch, version) that it cannot get: only a keyframe helps."""
    fenced: bool = False
    """The controller fenced it: it takes no tickets until it holds the current version, loaded afresh."""
    passed: str = ""
    """The last fence after which it did that."""
    bad_logprobs: int = 0
    """Responses that were refused for log-probabilities that are none."""
    logprobs_mode: str = ""
    """The engine's mode."""
    bans: list[str] = Field(default_factory=list)
    """Sampling settings in use that ban or bias tokens."""
    probe: Probe | None = None
    """The last probe of the engine's distribution."""
    error: str | None = None


def decode_status(raw: bytes | str) -> SamplerStatus:
    """An entry of the hash `samplers`. Raises MessageError for anything else."""
    try:
        return SamplerStatus.model_validate_json(raw)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        raise MessageError(f"sampler status: {first['loc']}: {first['msg']}") from exc


@dataclass(frozen=True)
class Message:
    """Base of messages; subclasses set `header_class` and `arrays` (name -> dtype)."""

    header_class: ClassVar[type[Header]]
    arrays: ClassVar[Mapping[str, str]] = {}

    def check(self) -> None:
        """Raise MessageError when header and arrays do not fit together."""


@dataclass(frozen=True)
class Ticket(Message):
    """A ticket. `prompt_ids`: i32 [P], P >= 1."""

    header_class: ClassVar[type[Header]] = TicketHeader
    arrays: ClassVar[Mapping[str, str]] = {"prompt_ids": "<i4"}
    header: TicketHeader
    prompt_ids: NDArray[np.int32]

    def check(self) -> None:
        if self.prompt_ids.size == 0:
            raise MessageError(f"ticket {self.header.ticket_id}: the prompt is empty")
        if self.prompt_ids.min() < 0:
            raise MessageError(f"ticket {self.header.ticket_id}: negative token id in the prompt")


@dataclass(frozen=True)
class Rollout(Message):
    """A rollout of T response tokens.

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
        """Shapes fit, numbers are finite log-probabilities, every token carries the header's version."""
        name = f"rollout {self.header.ticket_id}"
        tokens = self.response_ids.size
        if self.prompt_ids.size == 0 or tokens == 0:
            raise MessageError(f"{name}: prompt or response is empty")
        if self.logp.size != tokens or self.head_offsets.size != tokens + 1:
            raise MessageError(
                f"{name}: {tokens} response tokens, but {self.logp.size} log-probs and "
                f"{self.head_offsets.size} head offsets (expected one more than tokens)"
            )
        sizes = np.diff(self.head_offsets.astype(np.int64))  # in int32 a difference may wrap around
        if self.head_offsets[0] != 0 or (sizes < 0).any() or self.head_offsets[-1] != self.head_ids.size:
            raise MessageError(f"{name}: head offsets do not describe {self.head_ids.size} head entries")
        if self.head_ids.size != self.head_logp.size:
            raise MessageError(f"{name}: {self.head_ids.size} head ids but {self.head_logp.size} log-probs")
        for array_name in ("prompt_ids", "response_ids", "head_ids"):
            array = getattr(self, array_name)
            if array.size and array.min() < 0:
                raise MessageError(f"{name}: negative token id in {array_name}")
        for array_name in ("logp", "head_logp"):
            array = getattr(self, array_name)
            if not np.isfinite(array).all() or (array.size and array.max() > 1e-3):
                raise MessageError(f"{name}: {array_name} holds values that are not log-probabilities")
        if not math.isfinite(self.header.reward):
            raise MessageError(f"{name}: reward {self.header.reward} is not finite")
        expected = [(0, tokens, self.header.version)]
        if [tuple(span) for span in self.header.spans] != expected:
            raise MessageError(
                f"{name}: version spans {self.header.spans}, expected {expected} (one version throughout)"
            )


@dataclass(frozen=True)
class Report(Message):
    header_class: ClassVar[type[Header]] = ReportHeader
    header: ReportHeader


@dataclass(frozen=True)
class Verdict(Message):
    header_class: ClassVar[type[Header]] = VerdictHeader
    header: VerdictHeader


@dataclass(frozen=True)
class Event(Message):
    header_class: ClassVar[type[Header]] = EventHeader
    header: EventHeader


def draw_digest(response_ids: NDArray[Any], logp: NDArray[Any]) -> str:
    """xxh3 (16 hex digits) of drawn tokens [T] and their log-probabilities [T]."""
    state = xxhash.xxh3_64()
    state.update(np.ascontiguousarray(response_ids, dtype="<i4").tobytes())
    state.update(np.ascontiguousarray(logp, dtype="<f4").tobytes())
    return state.hexdigest()


AnyMessage = Ticket | Rollout | Report | Verdict | Event
M = TypeVar("M", Ticket, Rollout, Report, Verdict, Event)


def encode(message: AnyMessage) -> Fields:
    """Stream fields of a message. Raises MessageError when the message contradicts itself."""
    message.check()
    fields: Fields = {b"h": message.header.model_dump_json(exclude_none=True).encode()}
    for name, dtype in message.arrays.items():
        fields[b"a:" + name.encode()] = np.ascontiguousarray(getattr(message, name), dtype=dtype).tobytes()
    return fields


def decode(cls: type[M], fields: Mapping[bytes, bytes]) -> M:
    """The message of class `cls` in stream fields. Raises MessageError for anything else."""
    kind = cls.__name__.lower()
    raw = fields.get(b"h")
    if raw is None:
        raise MessageError(f"{kind}: no header; fields are {sorted(fields)[:8]}")
    if len(raw) > MAX_HEADER_BYTES:
        raise MessageError(f"{kind}: header of {len(raw)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    try:
        header = cls.header_class.model_validate_json(raw)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(p) for p in first["loc"])
        raise MessageError(f"{kind}: bad header: {where}: {first['msg']} (schema {SCHEMA_VERSION})") from exc
    arrays = {}
    for name, dtype in cls.arrays.items():
        data = fields.get(b"a:" + name.encode())
        if data is None or len(data) % np.dtype(dtype).itemsize:
            got = "nothing" if data is None else f"{len(data)} bytes"
            raise MessageError(f"{kind}: array {name}: {got}, expected a multiple of {dtype}")
        arrays[name] = np.frombuffer(data, dtype=dtype)
    message = cls(header=cast(Any, header), **arrays)
    message.check()
    return message


def pack(messages: list[Rollout]) -> bytes:
    """Rollouts as one byte string (length-prefixed fields), for broadcasting a batch between ranks."""
    parts = [len(messages).to_bytes(4, "little")]
    for message in messages:
        fields = encode(message)
        parts.append(len(fields).to_bytes(4, "little"))
        for key, value in fields.items():
            parts += [len(key).to_bytes(4, "little"), key, len(value).to_bytes(8, "little"), value]
    return b"".join(parts)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        if len(piece) != count:
            raise MessageError(f"packed rollouts end at byte {len(self.data)}, {count} more expected")
        self.at += count
        return piece

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")


def unpack(data: bytes) -> list[Rollout]:
    """The inverse of `pack`. Raises MessageError for anything that `pack` did not write."""
    reader = _Reader(data)
    messages = []
    for _ in range(reader.number(4)):
        fields: Fields = {}
        for _ in range(reader.number(4)):
            key = reader.take(reader.number(4))
            fields[key] = reader.take(reader.number(8))
        messages.append(decode(Rollout, fields))
    if reader.at != len(data):
        raise MessageError(f"packed rollouts end at byte {reader.at}, but there are {len(data)}")
    return messages
