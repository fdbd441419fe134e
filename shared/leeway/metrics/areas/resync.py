"""Around a resync: verdicts, weight versions, and KL on the prefixes of the old and the new policy."""

from __future__ import annotations

from leeway.metrics.metric import Column, Metric

VERDICT_ACTION = Metric(
    "verdict/action",
    unit="",
    help="`continue` or `resync`; absent without a verdict.",
    measured_by="launcher",
)
VERDICT_SELF = Metric(
    "verdict/self",
    unit="0 or 1",
    help="1 when no verdict on the step before arrived in time and the trainer applied the policy itself.",
)
SYNC_REASON = Metric("sync/reason", unit="", help="Rule that asked for the resync.", measured_by="launcher")
WEIGHTS_VERSION = Metric(
    "weights/version",
    unit="version",
    help="Weight version that drew the batch.",
    measured_by="launcher",
    column=Column(50, "version", "d"),
    summary="versions",
)
WEIGHTS_WIRE_BYTES = Metric(
    "weights/wire_bytes",
    unit="bytes",
    help="Bytes of the weights published since the step before; 0 without a resync.",
)
KL_SELF_PREFIX = Metric(
    "kl/self_prefix",
    unit="nats/token",
    help="KL(new || old) on the first fresh batch after a resync.",
)
KL_SELF_PREFIX_SE = Metric("kl/self_prefix_se", unit="nats/token", help="Standard error of kl/self_prefix.")
KL_SAMPLER_PREFIX = Metric(
    "kl/sampler_prefix", unit="nats/token", help="KL(old || new) on the last batch before a resync."
)
RESYNC_MISSING = Metric(
    "resync/missing",
    unit="share",
    help="Share of the update that the first fresh log-probabilities lack, for the worst sampler.",
)
RESYNC_MISSING_SE = Metric("resync/missing_se", unit="share", help="Standard error of resync/missing.")
RESYNC_SAMPLER = Metric("resync/sampler", unit="", help="The sampler that resync/missing is about.")

METRICS = (
    VERDICT_ACTION,
    VERDICT_SELF,
    SYNC_REASON,
    WEIGHTS_VERSION,
    WEIGHTS_WIRE_BYTES,
    KL_SELF_PREFIX,
    KL_SELF_PREFIX_SE,
    KL_SAMPLER_PREFIX,
    RESYNC_MISSING,
    RESYNC_MISSING_SE,
    RESYNC_SAMPLER,
)
