"""Assembling planned batches: a batch is complete when each of its slots holds a rollout, in any order.

Membership never depends on reward, length or arrival time: a rollout is dropped only for its version, run
epoch or configuration, because its slot is filled, or because its batch was already taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from leeway.errors import LeewayError
from leeway.messages import Rollout, Slot


class Admission(Enum):
    """What happened to a rollout."""

    ACCEPTED = "accepted"
    """It fills a slot of the current batch."""
    FUTURE = "future"
    """It fills a slot of a later batch."""
    DUPLICATE = "duplicate"
    """Its slot is filled, or its batch was taken."""
    VOID = "void"
    """It was drawn in another run epoch, or under another weight version or configuration than the accepted
    one."""


class AssemblyError(LeewayError):
    """A rollout for a slot outside the plan, or a batch that is taken before it is complete."""


class BatchAssembler:
    """Holds rollouts of the current batch and of later ones.

    Only rollouts of `epoch`, `version` and the configuration with digest `config` are accepted;
    `renew(version)` drops those of the version before.
    """

    def __init__(
        self, groups: int, group_size: int, *, epoch: int, version: int, batch: int = 0, config: str = ""
    ) -> None:
        self.groups, self.group_size = groups, group_size
        self.epoch, self.version, self.batch, self.config = epoch, version, batch, config
        self._held: dict[Slot, Rollout] = {}

    def add(self, rollout: Rollout) -> Admission:
        """Admit a rollout, or return why not. Raises AssemblyError for a slot outside the batch."""
        header, slot = rollout.header, rollout.header.slot
        if (header.epoch, header.version, header.config) != (self.epoch, self.version, self.config):
            return Admission.VOID
        if not (slot.group < self.groups and slot.index < self.group_size):
            raise AssemblyError(
                f"rollout {header.ticket_id}: slot (group {slot.group}, index {slot.index}) is outside a "
                f"batch of {self.groups} groups x {self.group_size}"
            )
        if slot.batch < self.batch or slot in self._held:
            return Admission.DUPLICATE
        self._held[slot] = rollout
        return Admission.ACCEPTED if slot.batch == self.batch else Admission.FUTURE

    def complete(self) -> bool:
        """Whether every slot of the current batch is filled."""
        return not self.awaited()

    def awaited(self) -> list[Slot]:
        """Empty slots of the current batch, in slot order."""
        return [slot for slot in self._slots() if slot not in self._held]

    def take(self) -> list[Rollout]:
        """The current batch in slot order (group, then index); the next batch becomes the current one.

        Raises AssemblyError while a slot is empty.
        """
        missing = self.awaited()
        if missing:
            raise AssemblyError(f"batch {self.batch}: {describe_slots(missing)} missing")
        taken = [self._held.pop(slot) for slot in self._slots()]
        self.batch += 1
        return taken

    def renew(self, version: int) -> list[Rollout]:
        """Accept only `version` from now on. Returns the rollouts held for the old one, in slot order."""
        if version <= self.version:
            raise AssemblyError(
                f"weight version {version} is not above version {self.version}: versions only rise"
            )
        self.version = version
        void = [self._held[slot] for slot in sorted(self._held)]
        self._held.clear()
        return void

    def _slots(self) -> Iterable[Slot]:
        return (
            Slot(self.batch, group, index) for group in range(self.groups) for index in range(self.group_size)
        )


def describe_slots(slots: list[Slot], limit: int = 8) -> str:
    """A short text for logs and errors: `3 of batch 7: 0/1, 2/0, 2/3` (group/index)."""
    if not slots:
        return "nothing"  # the last one arrived in the meantime
    named = ", ".join(f"{slot.group}/{slot.index}" for slot in slots[:limit])
    more = f" and {len(slots) - limit} more" if len(slots) > limit else ""
    return f"{len(slots)} of batch {slots[0].batch}: {named}{more} (group/index)"
