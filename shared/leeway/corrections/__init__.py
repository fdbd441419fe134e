"""Corrections for the mismatch between sampler and trainer: pure torch, no I/O.

    METHODS           name -> Method (settings, formula, what it needs, its loss); one module per method
    surrogate_loss    (TokenBatch, settings) -> (loss, metrics)
    prepare           what a method wants to know of the global batch before its gradients
    lr_scale          what a method does to the step's learning rate
    tail_weight       the weight off the reported head, for the trainer's output layer
    ess               effective sample size of the lag ratio
    predict_ess, predict_crossing   its Gaussian forecasts
    kl_rao_blackwell  KL between two policies at given prefixes
    lag_metrics       lag and discrepancy of a whole batch
    advantages        grpo, dr_grpo, rloo

Names are imported when they are first used: the registry and the settings of all methods work without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leeway.corrections.advantage import advantages
    from leeway.corrections.apply import lr_scale, prepare, surrogate_loss, tail_weight
    from leeway.corrections.batch import Denominators, TokenBatch
    from leeway.corrections.lag import ess, kl_rao_blackwell, lag_metrics, predict_crossing, predict_ess
    from leeway.corrections.registry import METHODS, Method

_HOME = {
    "advantages": "advantage",
    "lr_scale": "apply",
    "prepare": "apply",
    "surrogate_loss": "apply",
    "tail_weight": "apply",
    "Denominators": "batch",
    "TokenBatch": "batch",
    "ess": "lag",
    "lag_metrics": "lag",
    "kl_rao_blackwell": "lag",
    "predict_crossing": "lag",
    "predict_ess": "lag",
    "METHODS": "registry",
    "Method": "registry",
}
__all__ = [
    "METHODS",
    "Denominators",
    "Method",
    "TokenBatch",
    "advantages",
    "ess",
    "kl_rao_blackwell",
    "lag_metrics",
    "lr_scale",
    "predict_crossing",
    "predict_ess",
    "prepare",
    "surrogate_loss",
    "tail_weight",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
