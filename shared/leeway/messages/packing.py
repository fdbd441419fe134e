"""Several rollouts as one byte string, to broadcast a batch between the trainer's ranks."""

from __future__ import annotations

from leeway.messages.codec import Fields, decode, encode
from leeway.messages.headers import MessageError
from leeway.messages.kinds import Rollout


def pack(messages: list[Rollout]) -> bytes:
    """Rollouts as length-prefixed fields, little-endian."""
    parts = [len(messages).to_bytes(4, "little")]
    for message in messages:
        fields = encode(message)
        parts.append(len(fields).to_bytes(4, "little"))
        for key, value in fields.items():
            parts += [len(key).to_bytes(4, "little"), key, len(value).to_bytes(8, "little"), value]
    return b"".join(parts)


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
