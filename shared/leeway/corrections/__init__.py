"""Corrections for the mismatch between sampler and trainer: pure torch, no I/O.

    METHODS           name -> Method (formula, what it needs, its loss)
    surrogate_loss    (method, TokenBatch, CorrectionConfig) -> (loss, metrics)
    plan_batch        what a method wants to know of the global batch before its gradients
    lr_scale          what a method does to the step's learning rate
    ess               effective sample size of the lag ratio
    predict_ess, predict_crossing   its Gaussian forecasts
    kl_rao_blackwell  KL between two policies at given prefixes
    lag_metrics       lag and discrepancy of a whole batch
    advantages        grpo, dr_grpo, rloo

`leeway.corrections.names` lists the methods without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leeway.corrections.advantage import advantages
    from leeway.corrections.batch import Denominators, TokenBatch
    from leeway.corrections.lag import ess, kl_rao_blackwell, lag_metrics, predict_crossing, predict_ess
    from leeway.corrections.registry import METHODS, Method, lr_scale, plan_batch, surrogate_loss

_HOME = {
    "advantages": "advantage",
    "Denominators": "batch",
    "TokenBatch": "batch",
    "ess": "lag",
    "lag_metrics": "lag",
    "kl_rao_blackwell": "lag",
    "predict_crossing": "lag",
    "predict_ess": "lag",
    "METHODS": "registry",
    "lr_scale": "registry",
    "plan_batch": "registry",
    "Method": "registry",
    "surrogate_loss": "registry",
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
    "plan_batch",
    "predict_crossing",
    "predict_ess",
    "surrogate_loss",
]


def __getattr__(name: str) -> Any:
    # Late imports, so that reading a configuration does not load torch.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
