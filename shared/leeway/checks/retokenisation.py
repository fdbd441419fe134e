"""`retokenisation`: token ids travel, text does not.

`ids_unchanged` proves it: the sampler digests what the engine drew, the trainer digests what it trains on.
`drift` measures what text would have cost: how many responses change when they are decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leeway.checks.facts import Ledger, Trained, combined_digest
from leeway.checks.result import CheckResult, judge
from leeway.messages import Rollout

RoundTrip = Callable[[list[int]], tuple[str, list[int]]]
"""Token ids to (text, token ids of that text)."""


class Drift:
    """How many responses would not survive a way through text."""

    def __init__(self, round_trip: RoundTrip) -> None:
        self._round_trip = round_trip
        self.seen = self.changed = 0
        self.worst_at: float | None = None
        self.example = ""

    def add(self, rollout: Rollout) -> None:
        """Take in one rollout."""
        ids = rollout.response_ids.tolist()
        text, again = self._round_trip(ids)
        self.seen += 1
        if again == ids:
            return
        self.changed += 1
        at = next((i for i, (a, b) in enumerate(zip(ids, again, strict=False)) if a != b), len(again))
        # The earlier the first changed token, the more of the response belongs to another prefix.
        share = at / len(ids)
        if self.worst_at is None or share < self.worst_at:
            self.worst_at = share
            self.example = (
                f"{rollout.header.ticket_id} {text[:60]!r}: {_around(ids, at)} comes back as "
                f"{_around(again, at)} from token {at} on"
            )

    def result(self) -> CheckResult | None:
        """`retokenisation/drift`, never worse than ok: ids travel, so it costs nothing here."""
        if not self.seen:
            return None
        rate = self.changed / self.seen
        text = f"{self.changed} of {self.seen} responses would change by decoding and encoding"
        text += f"; worst: {self.example}" if self.example else ""
        return judge("retokenisation/drift", rate, text, fail=None)


def _around(ids: Sequence[int], at: int) -> str:
    return str(list(ids[at : at + 4]))


def check_unchanged(trained: Trained, ledger: Ledger, epoch: int) -> CheckResult | None:
    """`retokenisation/ids_unchanged`: what was trained is what the engines drew, token by token."""
    name, step = "retokenisation/ids_unchanged", trained.step
    if trained.altered:
        text = (
            f"{trained.altered} of {trained.responses} trained responses differ from what their sampler "
            f"drew, first {trained.altered_example}"
        )
        return judge(name, float(trained.altered), text, fail=0.0, step=step, version=trained.version)
    if trained.responses == 0:
        return None
    text = f"{trained.responses} digests made by the samplers equal those of what was trained"
    published = ledger.batch(epoch, trained.version, step)
    whole = len(published) == trained.responses and not (trained.missing_count or trained.foreign)
    witnessed = all(p.digest for p in published.values())
    if whole and witnessed and not ledger.conflicting(epoch, trained.version, step):
        expected = combined_digest((slot, published[slot].digest) for slot in sorted(published))
        if expected != trained.digest:
            text = f"the digest of the trained batch is {trained.digest}, {expected} was published"
            return judge(name, 1.0, text, fail=0.0, step=step, version=trained.version)
    return judge(name, 0.0, text, fail=0.0, step=step, version=trained.version)
