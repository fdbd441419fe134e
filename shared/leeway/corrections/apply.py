"""What a trainer calls: the loss and the other hooks of the method that the settings name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from leeway.config.correction import CorrectionConfig
from leeway.corrections.batch import TokenBatch
from leeway.corrections.clips import Clip, f_one
from leeway.corrections.primitives import aggregate
from leeway.corrections.registry import METHODS, Method
from leeway.corrections.weighted import Metrics


def method_of(config: CorrectionConfig) -> Method[Any]:
    """The method that `config` belongs to. Raises UsageError when there is none of that name."""
    method = METHODS[config.method]
    if not isinstance(config, method.settings):
        raise TypeError(
            f"correction {config.method}: expected {method.settings.__name__}, got {type(config).__name__}: "
            "make the settings with leeway.config.build_correction"
        )
    return method


def surrogate_loss(batch: TokenBatch, config: CorrectionConfig) -> tuple[Tensor, Metrics]:
    """The loss to minimise (scalar) and metrics (token means) of a batch.

    Partial batches add up: the losses of all micro-batches and ranks sum to the loss of the global batch
    (for methods with `prepare`, with `batch.prepared` from the global batch).
    """
    method = method_of(config)
    per_token, metrics = method.loss(batch.without_untrained(), config)
    return aggregate(per_token, batch, config.aggregation or method.aggregation), metrics


def prepare(batch: TokenBatch, config: CorrectionConfig) -> Mapping[str, float] | None:
    """What the method wants to know of the global batch before its gradients; None for most methods."""
    hook = method_of(config).prepare
    return None if hook is None else hook(replace(batch, prepared=None), config)


def lr_scale(batch: TokenBatch, config: CorrectionConfig) -> float:
    """Factor on the learning rate of the step, from the global batch; 1 for most methods."""
    hook = method_of(config).lr_scale
    return 1.0 if hook is None else hook(batch, config)


def tail_weight(config: CorrectionConfig) -> tuple[str, Clip]:
    """(reference, f) of the weight inside the expectation over the tail of the centre."""
    method = method_of(config)
    if method.weight is None:
        raise ValueError(f"correction {config.method} has no weight per token, so there is nothing to centre")
    weight = method.weight(config)
    return weight.ref, f_one() if config.centre == "plain" else weight.f
