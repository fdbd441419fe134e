"""What the measurements of `leeway bench weights` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leeway.errors import LeewayError
from leeway.streams import Keys
from leeway.weights import WeightManifest, publish_weights

if TYPE_CHECKING:
    from torch import Tensor

URL_ENV = "LEEWAY_BENCH_REDIS"
Weights = dict[str, "Tensor"]
Row = dict[str, Any]


class BenchError(LeewayError):
    """A measurement that failed."""


def publish(
    client: Any,
    keys: Keys,
    version: int,
    new: Weights,
    old: Weights | None,
    base: WeightManifest | None,
    config: str = "",
) -> WeightManifest:
    """Publish `new` as `version`: in full, or as the delta from `old`, whose manifest is `base`.

    `config`: digest of the samplers' configuration.
    """
    pairs: Any = new.items() if old is None else ((name, new[name], old[name]) for name in new)
    return publish_weights(
        client, keys, epoch=0, version=version, step=0, tensors=pairs, base=base, config=config
    )
