"""The facts that checks compare: rollouts as published, and batches as trained.

The trainer describes the arrays of its step (`trained_facts`) and sends the description with its report. The
controller reads the same rollouts from the stream (`Published`) and compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from leeway.checks.stats import repetition
from leeway.config import BatchConfig
from leeway.messages import ReportHeader, Rollout, Slot, draw_digest
from leeway.metrics.areas.data import (
    DATA_ALTERED,
    DATA_ALTERED_EXAMPLE,
    DATA_DENOMINATOR_SEQUENCES,
    DATA_DENOMINATOR_TOKENS,
    DATA_DIGEST,
    DATA_DUPLICATES,
    DATA_FOREIGN,
    DATA_LENGTHS,
    DATA_MISSING,
    DATA_MISSING_SLOTS,
    DATA_RESPONSES,
    DATA_TOKENS,
    DATA_VERSION_MAX,
    DATA_VERSION_MIN,
)
from leeway.metrics.areas.lag import LAG_AGE
from leeway.metrics.areas.response import RESPONSE_ENTROPY, RESPONSE_LENGTH_MEAN, RESPONSE_REPETITION
from leeway.metrics.areas.reward import REWARD_MEAN

Metrics = Mapping[str, float | int | str | None]
MAX_NAMED_SLOTS = 200
"""Maximum number of slots that a report names."""


@dataclass(frozen=True)
class Published:
    """A rollout as published in the stream."""

    slot: Slot
    epoch: int
    version: int
    order: int
    """Position in the order of publication."""
    tokens: int
    reward: float
    sampler: str
    digest: str

    @classmethod
    def of(cls, rollout: Rollout, order: int) -> Published:
        """The facts of one stream entry."""
        header = rollout.header
        return cls(
            slot=header.slot,
            epoch=header.epoch,
            version=header.version,
            order=order,
            tokens=int(rollout.response_ids.size),
            reward=header.reward,
            sampler=header.sampler,
            digest=header.digest,
        )


def requested_slots(batch: int, config: BatchConfig) -> list[Slot]:
    """All slots of a batch, in slot order."""
    return [Slot(batch, g, i) for g in range(config.prompts) for i in range(config.group_size)]


def combined_digest(parts: Iterable[tuple[Slot, str]]) -> str:
    """Digest (16 hex digits) over the slots of a batch and the digests of their responses."""
    state = xxhash.xxh3_64()
    for slot, digest in parts:
        state.update(f"{slot.batch}.{slot.group}.{slot.index}:{digest};".encode())
    return state.hexdigest()


def length_histogram(lengths: Iterable[int]) -> list[int]:
    """Number of responses of 1, 2, 3-4, 5-8, ... tokens."""
    counts = Counter(max(0, int(length) - 1).bit_length() for length in lengths)
    return [counts.get(i, 0) for i in range(max(counts, default=0) + 1)]


def trained_facts(
    rollouts: Sequence[Rollout], config: BatchConfig, step: int
) -> dict[str, float | int | str]:
    """Metrics `data/*` and `response/*` of the trained batch, computed from the arrays themselves."""
    slots = [rollout.header.slot for rollout in rollouts]
    missing = sorted(set(requested_slots(step, config)) - set(slots))
    digests = [draw_digest(rollout.response_ids, rollout.logp) for rollout in rollouts]
    altered = [
        r.header.ticket_id for r, d in zip(rollouts, digests, strict=True) if r.header.digest not in ("", d)
    ]
    versions = [version for r in rollouts for _, _, version in r.header.spans]
    repeated = [value for r in rollouts if (value := repetition(r.response_ids)) is not None]
    surprisal = np.concatenate([r.logp for r in rollouts]) if rollouts else np.zeros(1)
    facts: dict[str, float | int | str] = {
        DATA_RESPONSES: len(rollouts),
        DATA_MISSING: len(missing),
        DATA_FOREIGN: sum(slot.batch != step for slot in slots),
        DATA_DUPLICATES: len(slots) - len(set(slots)),
        DATA_LENGTHS: " ".join(map(str, length_histogram(r.response_ids.size for r in rollouts))),
        DATA_TOKENS: sum(int(r.response_ids.size) for r in rollouts),
        DATA_DIGEST: combined_digest(zip(slots, digests, strict=True)),
        DATA_ALTERED: len(altered),
        DATA_VERSION_MIN: min(versions, default=0),
        DATA_VERSION_MAX: max(versions, default=0),
        RESPONSE_ENTROPY: float(-surprisal.mean()),
    }
    if repeated:
        facts[RESPONSE_REPETITION] = sum(repeated) / len(repeated)
    if missing:
        facts[DATA_MISSING_SLOTS] = " ".join(f"{s.group}/{s.index}" for s in missing[:MAX_NAMED_SLOTS])
    if altered:
        facts[DATA_ALTERED_EXAMPLE] = altered[0]
    return facts


@dataclass(frozen=True)
class Trained:
    """A trained batch, from a step report that contains `trained_facts`."""

    step: int
    version: int
    age: float
    responses: int
    missing: tuple[Slot, ...]
    missing_count: int
    foreign: int
    duplicates: int
    lengths: tuple[int, ...]
    tokens: int
    digest: str
    altered: int
    altered_example: str
    reward_mean: float
    length_mean: float
    versions: tuple[int, int]
    denominator_sequences: int
    denominator_tokens: int

    @classmethod
    def of(cls, report: ReportHeader) -> Trained | None:
        """The facts of a report; None if it does not contain them."""
        metrics = report.metrics
        if DATA_DIGEST not in metrics:
            return None
        named = str(metrics.get(DATA_MISSING_SLOTS) or "").split()
        pairs = [name.split("/") for name in named]
        return cls(
            step=report.step,
            version=report.version,
            age=number(metrics, LAG_AGE),
            responses=int(number(metrics, DATA_RESPONSES)),
            missing=tuple(Slot(report.step, int(g), int(i)) for g, i in pairs),
            missing_count=int(number(metrics, DATA_MISSING)),
            foreign=int(number(metrics, DATA_FOREIGN)),
            duplicates=int(number(metrics, DATA_DUPLICATES)),
            lengths=tuple(map(int, str(metrics.get(DATA_LENGTHS) or "0").split())),
            tokens=int(number(metrics, DATA_TOKENS)),
            digest=str(metrics[DATA_DIGEST]),
            altered=int(number(metrics, DATA_ALTERED)),
            altered_example=str(metrics.get(DATA_ALTERED_EXAMPLE) or ""),
            reward_mean=number(metrics, REWARD_MEAN),
            length_mean=number(metrics, RESPONSE_LENGTH_MEAN),
            versions=(int(number(metrics, DATA_VERSION_MIN)), int(number(metrics, DATA_VERSION_MAX))),
            denominator_sequences=int(number(metrics, DATA_DENOMINATOR_SEQUENCES)),
            denominator_tokens=int(number(metrics, DATA_DENOMINATOR_TOKENS)),
        )


def number(metrics: Metrics, name: str, missing: float = 0.0) -> float:
    """A metric as a number; `missing` if it is absent or not a number."""
    value = metrics.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else missing


class Ledger:
    """Rollouts of batches that are not trained yet: the first one published per slot and version."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, int, Slot], Published] = {}
        self._conflicts: set[tuple[int, int, Slot]] = set()
        self._order = 0

    def add(self, rollout: Rollout) -> Published:
        """Add a rollout, in the order of the stream."""
        published = Published.of(rollout, self._order)
        self._order += 1
        key = (published.epoch, published.version, published.slot)
        first = self._first.setdefault(key, published)
        if first.digest != published.digest:
            self._conflicts.add(key)
        return published

    def batch(self, epoch: int, version: int, batch: int) -> dict[Slot, Published]:
        """The rollouts published for a batch under a version."""
        return {
            slot: published
            for (e, v, slot), published in self._first.items()
            if (e, v, slot.batch) == (epoch, version, batch)
        }

    def conflicting(self, epoch: int, version: int, batch: int) -> bool:
        """Whether a slot of the batch has two different responses (a ticket that was claimed twice)."""
        return any((e, v, s.batch) == (epoch, version, batch) for e, v, s in self._conflicts)

    def forget(self, epoch: int, below: int) -> None:
        """Drop batches below `below` and all earlier run epochs."""
        kept = {key for key in self._first if key[0] >= epoch and key[2].batch >= below}
        self._first = {key: value for key, value in self._first.items() if key in kept}
        self._conflicts &= kept
