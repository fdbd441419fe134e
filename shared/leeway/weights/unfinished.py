"""Where an advance of a host copy is, so that an interrupted one goes on there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leeway.weights.chunks import ByteStream
from leeway.weights.manifest import WeightManifest


@dataclass
class Unfinished:
    """An advance that was interrupted, or is going on: where in `chain` it is."""

    chain: Sequence[WeightManifest]
    reached: WeightManifest | None
    """The version that the buffer held before the one in progress."""
    index: int = 0
    tensor: int = 0
    piece: int = 0
    stream: ByteStream | None = None
    entered: bool = False
    fresh: bool = False
    """The version in progress is a keyframe that fills an empty buffer."""

    def leads_to(self, chain: Sequence[WeightManifest]) -> bool:
        """Whether `chain` begins with what was done and what is in progress."""
        mine, others = self.chain[: self.index + 1], chain[: self.index + 1]
        return [(m.key, m.digest) for m in mine] == [(m.key, m.digest) for m in others]

    def next_version(self, reached: WeightManifest) -> None:
        """The version in progress is complete."""
        self.reached, self.index = reached, self.index + 1
        self.tensor, self.piece, self.stream, self.entered, self.fresh = 0, 0, None, False, False
