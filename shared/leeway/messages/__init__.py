"""What travels over the streams: a small JSON header and raw little-endian arrays. Never pickle.

headers.py  the pydantic header of each message
kinds.py    the messages: a header and its arrays
checks.py   whether header and arrays fit together
codec.py    a message to the fields of a stream entry, and back
packing.py  several rollouts as one byte string
digest.py   the digest of what an engine drew
status.py   a sampler's status, see `leeway.statuses`
"""

from leeway.messages.codec import MAX_HEADER_BYTES, Fields, decode, encode
from leeway.messages.digest import draw_digest
from leeway.messages.headers import (
    SCHEMA_VERSION,
    EventHeader,
    EventLevel,
    Header,
    MessageError,
    ReportHeader,
    RolloutHeader,
    Slot,
    SlotHeader,
    TicketHeader,
    VerdictHeader,
)
from leeway.messages.kinds import AnyMessage, Event, Message, Report, Rollout, Ticket, Verdict
from leeway.messages.packing import pack, unpack
from leeway.messages.status import Probe, SamplerStatus, decode_status, encode_status

__all__ = [
    "MAX_HEADER_BYTES",
    "SCHEMA_VERSION",
    "AnyMessage",
    "Event",
    "EventHeader",
    "EventLevel",
    "Fields",
    "Header",
    "Message",
    "MessageError",
    "Probe",
    "Report",
    "ReportHeader",
    "Rollout",
    "RolloutHeader",
    "SamplerStatus",
    "Slot",
    "SlotHeader",
    "Ticket",
    "TicketHeader",
    "Verdict",
    "VerdictHeader",
    "decode",
    "decode_status",
    "draw_digest",
    "encode",
    "encode_status",
    "pack",
    "unpack",
]
