"""The launcher's copy of the check results: DIR/checks.json, and the counts that go with every step."""

from __future__ import annotations

import time
from pathlib import Path

import redis

from leeway.checks.board import FILE_NAME, Records, dump_records, load_records, read_records, take_in
from leeway.errors import LeewayError
from leeway.streams import Keys
from leeway_host.launch.record import write_atomic

EVERY_S = 2.0


class CheckFile:
    """Follows the hash `checks` of a run. What a directory holds already (a resumed run) stays in it."""

    def __init__(self, client: redis.Redis, keys: Keys, out: Path) -> None:
        self.client, self.keys, self.path = client, keys, out / FILE_NAME
        self._earlier = read_records(self.path)
        self._records: Records = {}
        self._read_at = 0.0

    def counts(self) -> dict[str, int]:
        """Measures by their worst status so far."""
        worst = [record.worst.status for record in self._records.values()]
        return {f"checks/{status}": worst.count(status) for status in ("ok", "warn", "fail")}

    def update(self, *, budget_s: float, force: bool = False) -> None:
        """Read the results, at most every EVERY_S seconds unless `force`; write them when they changed."""
        if not force and time.monotonic() - self._read_at < EVERY_S:
            return
        self._read_at = time.monotonic()
        now = load_records(self.client, self.keys, budget_s=budget_s)
        records = dict(self._earlier)
        for record in now.values():
            take_in(records, record)
        if records != self._records:
            self._records = records
            write_atomic(self.path, dump_records(records))

    def close(self) -> None:
        """The last results; a server that is gone has none."""
        try:
            self.update(budget_s=1.0, force=True)
        except (LeewayError, redis.RedisError, OSError):
            pass  # the results so far are in the file
