"""A message as the fields of a stream entry, and back.

An entry has the field `h` (JSON of the header) and one field per array, `a:<name>`. Names and types of arrays
belong to the message class, so that a decoder never takes a type from the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import numpy as np
from pydantic import ValidationError

from leeway.messages.headers import SCHEMA_VERSION, MessageError
from leeway.messages.kinds import AnyMessage, Event, Report, Rollout, Ticket, Verdict

MAX_HEADER_BYTES = 1 << 20
"""Headers are small by design; a larger one is rejected before it is parsed."""

Fields = dict[bytes, bytes]
M = TypeVar("M", Ticket, Rollout, Report, Verdict, Event)


def encode(message: AnyMessage) -> Fields:
    """Stream fields of a message. Raises MessageError if the message contradicts itself."""
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
