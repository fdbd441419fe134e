"""Rollouts that somebody else deleted: noticed, because the server's permissions cannot prevent it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

from leeway.streams import retrying


class Deletions:
    """Entries of a stream that were deleted by anyone but this process.

    Who may write to a stream may also trim it (XADD MAXLEN). The server counts what was ever added, and each
    entry is deleted once: more are missing than this process has deleted itself if somebody else did it.
    Servers older than Redis 7.0 do not count; nothing is noticed there.
    """

    def __init__(self, client: redis.Redis, stream: str, budget_s: float) -> None:
        self._client, self._stream, self._budget_s = client, stream, budget_s
        self._expected = self._missing()

    def expect(self, ids: Sequence[bytes]) -> None:
        """This process is about to delete the entries `ids`, for the first time."""
        self._expected += len(ids)

    def by_others(self) -> int:
        """How many entries that this process has not deleted are missing. Raises RedisUnavailable."""
        return max(0, self._missing() - self._expected)

    def _missing(self) -> int:
        def read() -> int:
            try:
                info: Any = self._client.xinfo_stream(self._stream)
            except redis.ResponseError as error:
                if "no such key" not in str(error):
                    raise
                return 0  # the stream is gone, and with it the run
            return int(info.get("entries-added", info["length"])) - int(info["length"])

        return retrying(read, budget_s=self._budget_s, what=f"looking at {self._stream}")
