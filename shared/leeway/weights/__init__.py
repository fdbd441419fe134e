"""Weight versions on the wire.

manifest.py    what a version is, and what can be wrong with it
codec.py       lossless delta of a tensor
plan.py        decisions: full or delta, which chain to read, what to free, what fits
chunks.py      a byte stream as digested entries of a Redis stream
publish.py     writing a version
host_copy.py   reading versions
unfinished.py  where an interrupted read is
patience.py    a budget that progress renews
nccl_offer.py  where samplers join the group of a version that travels by NCCL
"""

from leeway.weights.chunks import ChunkSource
from leeway.weights.host_copy import HostCopy
from leeway.weights.manifest import (
    TensorSpec,
    WeightManifest,
    WeightsCorrupt,
    WeightsError,
    WeightsNotFinite,
    WeightsTooLarge,
    WeightsVersionRefused,
    weights_digest,
)
from leeway.weights.patience import FetchCancelled, Patience
from leeway.weights.plan import VersionKey, decide_codec, plan_chain, plan_free, room_for
from leeway.weights.publish import (
    CHUNK_BYTES,
    free_versions,
    latest_manifest,
    parse_manifest,
    publish_offer,
    publish_weights,
    published_manifests,
)

__all__ = [
    "CHUNK_BYTES",
    "ChunkSource",
    "FetchCancelled",
    "HostCopy",
    "Patience",
    "TensorSpec",
    "VersionKey",
    "WeightManifest",
    "WeightsCorrupt",
    "WeightsError",
    "WeightsNotFinite",
    "WeightsTooLarge",
    "WeightsVersionRefused",
    "decide_codec",
    "free_versions",
    "latest_manifest",
    "parse_manifest",
    "plan_chain",
    "plan_free",
    "publish_offer",
    "publish_weights",
    "published_manifests",
    "room_for",
    "weights_digest",
]
