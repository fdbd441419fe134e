"""The launcher's copy of the check results: DIR/checks.json, and the counts in every step's row."""

from __future__ import annotations

import time
from pathlib import Path

import redis

from leeway.checks.board import FILE_NAME, Records, dump_records, load_records, merge_record, read_records
from leeway.checks.result import Status
from leeway.errors import LeewayError
from leeway.metrics import Metric
from leeway.metrics.areas.checks import CHECKS_FAIL, CHECKS_OK, CHECKS_WARN
from leeway.streams import Keys
from leeway_host.launch.record import write_atomic

EVERY_S = 2.0
BY_STATUS: dict[Status, Metric] = {"ok": CHECKS_OK, "warn": CHECKS_WARN, "fail": CHECKS_FAIL}


class CheckFile:
    """Copies the hash `checks` of a run to DIR/checks.json; results from before a resume are kept."""

    def __init__(self, client: redis.Redis, keys: Keys, out: Path) -> None:
        self.client, self.keys, self.path = client, keys, out / FILE_NAME
        self._earlier = read_records(self.path)
        self._records: Records = {}
        self._read_at = 0.0

    def counts(self) -> dict[str, int]:
        """Number of measures by their worst status so far, as metrics of a step."""
        worst = [record.worst.status for record in self._records.values()]
        return {str(metric): worst.count(status) for status, metric in BY_STATUS.items()}

    def update(self, *, budget_s: float, force: bool = False) -> None:
        """Read the results, at most every EVERY_S seconds unless `force`, and write them if they changed."""
        if not force and time.monotonic() - self._read_at < EVERY_S:
            return
        self._read_at = time.monotonic()
        now = load_records(self.client, self.keys, budget_s=budget_s)
        records = dict(self._earlier)
        for record in now.values():
            merge_record(records, record)
        if records != self._records:
            self._records = records
            write_atomic(self.path, dump_records(records))

    def close(self) -> None:
        """Copy the last results, if the server still answers."""
        try:
            self.update(budget_s=1.0, force=True)
        except (LeewayError, redis.RedisError, OSError):
            pass  # the file holds the results so far
