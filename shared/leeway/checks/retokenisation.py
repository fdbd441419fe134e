"""`retokenisation`: responses are sent as token ids and never as text.

`ids_unchanged` verifies it: the sampler digests what the engine drew, the trainer digests what it trains on.
`drift` measures the cost of sending text: how many responses change when they are decoded and re-encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leeway.checks.facts import Ledger, Trained, combined_digest
from leeway.checks.result import CheckResult, judge
from leeway.messages import Rollout

RoundTrip = Callable[[list[int]], tuple[str, list[int]]]
"""Maps token ids to (text, token ids of that text)."""


class Drift:
    """Counts the responses that decoding and re-encoding would change."""

    def __init__(self, round_trip: RoundTrip) -> None:
        self._round_trip = round_trip
        self.seen = self.changed = 0
        self.worst_at: float | None = None
        self.example = ""

    def add(self, rollout: Rollout) -> None:
        """Add one rollout."""
        ids = rollout.response_ids.tolist()
        text, again = self._round_trip(ids)
        self.seen += 1
        if again == ids:
            return
        self.changed += 1
        at = next((i for i, (a, b) in enumerate(zip(ids, again, strict=False)) if a != b), len(again))
        # The earlier the first changed token, the more of the response follows a different prefix.
        share = at / len(ids)
        if self.worst_at is None or share < self.worst_at:
            self.worst_at = share
            self.example = (
                f"{rollout.header.ticket_id} {text[:60]!r}: {_around(ids, at)} becomes "
                f"{_around(again, at)} from token {at} on"
            )

    def result(self) -> CheckResult | None:
        """`retokenisation/drift`, always ok: token ids are sent, so drift has no effect."""
        if not self.seen:
            return None
        rate = self.changed / self.seen
        text = f"{self.changed} of {self.seen} responses would change by decoding and re-encoding"
        text += f"; worst: {self.example}" if self.example else ""
        return judge("retokenisation/drift", rate, text, fail=None)


def _around(ids: Sequence[int], at: int) -> str:
    return str(list(ids[at : at + 4]))


def check_unchanged(trained: Trained, ledger: Ledger, epoch: int) -> CheckResult | None:
    """`retokenisation/ids_unchanged`: trained tokens are exactly those that the engines drew."""
    name, step = "retokenisation/ids_unchanged", trained.step
    if trained.altered:
        text = (
            f"{trained.altered} of {trained.responses} trained responses differ from what their sampler "
            f"drew, first {trained.altered_example}"
        )
        return judge(name, float(trained.altered), text, fail=0.0, step=step, version=trained.version)
    if trained.responses == 0:
        return None
    text = f"{trained.responses} digests computed by samplers equal those of the trained responses"
    published = ledger.batch(epoch, trained.version, step)
    whole = len(published) == trained.responses and not (trained.missing_count or trained.foreign)
    witnessed = all(p.digest for p in published.values())
    if whole and witnessed and not ledger.conflicting(epoch, trained.version, step):
        expected = combined_digest((slot, published[slot].digest) for slot in sorted(published))
        if expected != trained.digest:
            text = f"the digest of the trained batch is {trained.digest}, {expected} was published"
            return judge(name, 1.0, text, fail=0.0, step=step, version=trained.version)
    return judge(name, 0.0, text, fail=0.0, step=step, version=trained.version)
