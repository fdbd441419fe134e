"""What a correction is, and all of them by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from leeway.config.correction import CorrectionConfig
from leeway.registry import Registry

if TYPE_CHECKING:
    from leeway.corrections.batch import TokenBatch
    from leeway.corrections.clips import TokenWeight
    from leeway.corrections.weighted import PerToken

S = TypeVar("S", bound=CorrectionConfig)
Needs = Literal["logp_mu", "logp_sync", "logp_prox", "head", "pre-pass"]


@dataclass(frozen=True)
class Method(Generic[S]):
    """A correction: one module of `leeway.corrections.methods`, or of an installed package.

    The functions get the method's own settings. They import torch when they are called, because services
    without torch read the settings, too.
    """

    settings: type[S]
    """Its keys of the section `correction`; `method` is a Literal of its name."""
    formula: str
    """The estimator; its negative is the gradient of the loss."""
    needs: tuple[Needs, ...]
    """What it reads beyond pi_theta. `pre-pass`: an extra forward pass of pi_theta before the gradients."""
    source: str
    loss: Callable[[TokenBatch, S], PerToken]
    """(per-token loss [N], metrics) of a micro-batch or of the global batch. `leeway corrections compare`
    shows the metrics of `leeway.corrections.weighted.weight_metrics`, or 0 without them."""
    weight: Callable[[S], TokenWeight] | None = None
    """The weight of a token, for methods that can be centred."""
    aggregation: str = "token-mean"
    """Used when correction.aggregation is null."""
    prepare: Callable[[TokenBatch, S], Mapping[str, float]] | None = None
    """Looks at the global batch before any gradient, for weights that depend on all of it; the loss finds the
    result in `TokenBatch.prepared`."""
    lr_scale: Callable[[TokenBatch, S], float] | None = None
    """Factor on the learning rate of the step, from the global batch after the gradients."""
    variants: Mapping[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    """Rows of `leeway corrections compare`: label after the method's name -> settings."""

    @property
    def name(self) -> str:
        """The value of `correction.method`."""
        return str(self.settings.model_fields["method"].default)


METHODS: Registry[Method[Any]] = Registry(
    "leeway.corrections", "leeway.corrections.methods", "METHOD", Method, "correction"
)
"""All corrections by name; one is imported when it is first asked for."""
