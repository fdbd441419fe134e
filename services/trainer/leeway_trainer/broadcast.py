"""Publishing versions of theta, whatever the transport.

    rank 0: drop the versions that no live sampler needs
    all ranks: the transport publishes theta
    published -> it is `last`;  no room -> everything stays as it is

theta_s holds the numbers of `last` while a version is published, so that a transport can send what changed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from leeway.telemetry.tracing import messaging, span
from leeway.weights import (
    VersionKey,
    WeightManifest,
    WeightsTooLarge,
    free_versions,
    plan_free,
    published_manifests,
)
from leeway.weights.manifest import ITEM_BYTES
from leeway_trainer.model import DTYPES
from leeway_trainer.snapshot import wire_tensors
from leeway_trainer.transports.base import Link, NewVersion, Transport

if TYPE_CHECKING:
    from leeway_trainer.policy import Policy
    from leeway_trainer.snapshot import Snapshot

log = logging.getLogger(__name__)


class Broadcaster:
    """Publishes the versions of one run epoch. Every rank calls `publish` and `refresh`."""

    def __init__(self, transport: Transport, link: Link, policy: Policy, theta_s: Snapshot) -> None:
        self.transport, self.link = transport, link
        self.policy, self.theta_s = policy, theta_s
        self.dtype = DTYPES[link.config.weights.dtype]
        self.last: WeightManifest | None = None
        """Rank 0: the version published last."""
        self._no_room_after: VersionKey | None = None
        """A version that no other could follow, for lack of room."""

    def publish(self, version: int, step: int) -> WeightManifest | None:
        """Publish theta as `version`; the manifest on rank 0, None elsewhere. theta_s does not change.

        Raises WeightsTooLarge, on every rank alike, when there is no room for it; nothing changes then.
        """
        attributes = {**messaging("send", self.link.keys.weights), "leeway.version": version}
        with span("publish weights", attributes, kind="producer") as opened:
            try:
                sent = self.transport.publish(self._new_version(version, step), self.link)
            except WeightsTooLarge:
                self._no_room_after = None if self.last is None else self.last.key
                raise
            if opened is not None and sent is not None:
                opened.set_attributes({"leeway.codec": sent.codec, "leeway.wire_bytes": sent.wire_nbytes})
        if sent is not None:
            self.last = sent
            log.info("published version %d (%s, %d bytes)", version, sent.codec, sent.wire_nbytes)
        return sent

    def refresh(self, step: int) -> None:
        """Copy theta into theta_s; called by all ranks, before the next version is published."""
        self.theta_s.refresh(wire_tensors(self.policy, self.dtype, step=step))

    def keyframe_wanted(self) -> bool:
        """Rank 0: whether a live sampler reports that it cannot load the version published last."""
        last = self.last
        if last is None or last.key == self._no_room_after:
            return False
        return any(status.stuck == last.key for status in self.link.live_samplers())

    def _new_version(self, version: int, step: int) -> NewVersion:
        first = self.link.ranks.first
        values = sum(getattr(p, "ds_numel", p.numel()) for _, p in self.policy.named_parameters())
        return NewVersion(
            number=version,
            step=step,
            nbytes=values * ITEM_BYTES[self.link.config.weights.dtype],
            tensors=lambda: wire_tensors(self.policy, self.dtype, step=step),
            changes=lambda: self.theta_s.beside(wire_tensors(self.policy, self.dtype, step=step), self.dtype),
            base=self.last,
            published=self._drop_unneeded() if first else [],
            resend=first and self.keyframe_wanted(),
        )

    def _drop_unneeded(self) -> list[WeightManifest]:
        """Drop versions that no live sampler needs; returns those that are left, oldest first."""
        link = self.link
        held = [(s.epoch, s.version) for s in link.live_samplers() if s.version >= 0]
        published = link.call(lambda client: published_manifests(client, link.keys), "reading manifests")
        old = plan_free(published, held)
        link.call(
            lambda client: free_versions(client, link.keys, old, epoch=link.epoch, budget_s=link.budget_s),
            "freeing weights",
        )
        self.transport.free(old, link)
        return [manifest for manifest in published if manifest not in old]
