"""Feeds the infrastructure checks with what passes over the streams, and posts their results.

The stream `rollouts` is read without a group, so that nothing waits for this reader and nothing is taken from
the trainer. A rollout that is trained and deleted before it is read here does not count.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

import redis

from leeway.checks import Monitor
from leeway.checks.board import load_records, post
from leeway.checks.result import CheckResult
from leeway.checks.retokenisation import RoundTrip
from leeway.config import RunConfig
from leeway.messages import MessageError, ReportHeader, Rollout, SamplerStatus, decode
from leeway.models.tokenizer import load_tokenizer
from leeway.streams import Keys, Tail
from leeway.weights import WeightManifest

log = logging.getLogger(__name__)

READ_COUNT = 32
"""Rollouts per read; with its head one has a few hundred kilobytes at most."""
READS_PER_TICK = 16
STATUS_EVERY_S = 1.0
MAX_PENDING_REPORTS = 64
"""Maximum number of reports that wait for their rollouts to be read; older ones are dropped."""


class CheckFeed:
    """Feeds the checks of one run, driven by the controller's loop."""

    def __init__(
        self, client: redis.Redis, keys: Keys, config: RunConfig, round_trip: RoundTrip | None = None
    ) -> None:
        self.client, self.keys = client, keys
        self.budget_s = config.redis.reconnect_s
        self.monitor = Monitor(config, round_trip)
        self._records = load_records(client, keys, budget_s=self.budget_s)
        self._rollouts = Tail(client, keys.rollouts, budget_s=self.budget_s)
        self._reports: deque[ReportHeader] = deque(maxlen=MAX_PENDING_REPORTS)
        self._statuses_at = 0.0

    def on_report(self, report: ReportHeader) -> None:
        """A step report; it is evaluated once all rollouts written before it are read."""
        if report.event == "step":
            self._reports.append(report)

    def on_manifest(self, manifest: WeightManifest) -> None:
        """A weight version was published."""
        self.monitor.on_manifest(manifest.epoch, manifest.version, manifest.digest)

    def poll(self, statuses: Sequence[SamplerStatus]) -> None:
        """Read new rollouts, evaluate steps whose rollouts are read, post the results."""
        results: list[CheckResult] = []
        if self._read_rollouts():
            while self._reports:
                results += self.monitor.on_step(self._reports.popleft())
        if results or time.monotonic() - self._statuses_at >= STATUS_EVERY_S:
            self._statuses_at = time.monotonic()
            results += self.monitor.on_statuses(statuses)
        for news in post(
            self.client, self.keys, self._records, results, source="controller", budget_s=self.budget_s
        ):
            log.warning("check %s: %s: %s", news.name, news.status, news.evidence)

    def _read_rollouts(self) -> bool:
        """Read rollouts; True if the end of the stream was reached."""
        for _ in range(READS_PER_TICK):
            entries = self._rollouts.read(READ_COUNT, None)
            for entry in entries:
                try:
                    self.monitor.on_rollout(decode(Rollout, entry.fields))
                except MessageError as exc:
                    self.monitor.on_rejected(str(exc))
            if len(entries) < READ_COUNT:
                return True
        return False


def text_round_trip(model_dir: str, trust_remote_code: bool) -> RoundTrip:
    """Token ids -> (text, ids of the text), by the model's tokenizer, special tokens included."""
    tokenizer = load_tokenizer(model_dir, trust_remote_code=trust_remote_code, local_files_only=True)

    def there_and_back(ids: list[int]) -> tuple[str, list[int]]:
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text, tokenizer.encode(text, add_special_tokens=False)

    return there_and_back
