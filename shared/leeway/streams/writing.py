"""Writing stream entries."""

from __future__ import annotations

from typing import Any, cast

import redis

from leeway.messages import AnyMessage, Fields, encode
from leeway.streams.retry import retrying


def append(
    client: redis.Redis,
    stream: str,
    message: AnyMessage,
    *,
    maxlen: int | None = None,
    budget_s: float = 60.0,
) -> bytes:
    """Write one entry and return its id. Retries for `budget_s` while the server is unreachable or full."""
    fields = encode(message)
    return retrying(
        lambda: add_fields(client, stream, fields, maxlen), budget_s=budget_s, what=f"writing to {stream}"
    )


def add_fields(client: Any, stream: str, fields: Fields, maxlen: int | None = None) -> bytes:
    """One XADD on a client or pipeline; `maxlen` caps the stream (only for `events`)."""
    return cast(bytes, client.xadd(stream, cast(Any, fields), maxlen=maxlen, approximate=maxlen is not None))
