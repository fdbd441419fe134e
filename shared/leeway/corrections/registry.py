"""The table of corrections, and the functions that a trainer calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from leeway.config import CorrectionConfig
from leeway.corrections import methods
from leeway.corrections.batch import TokenBatch
from leeway.corrections.methods import Metrics, PerToken
from leeway.corrections.names import METHOD_SETTINGS
from leeway.corrections.primitives import aggregate


@dataclass(frozen=True)
class Method:
    """A correction.

    `loss(batch, config)` gives the per-token loss [N] and metrics. `plan(batch, config)` looks at the global
    batch before any gradient, for methods whose weights depend on all of it; `lr_scale(batch, config)` at the
    global batch after it, for methods that change the learning rate of the step.
    """

    name: str
    formula: str
    needs: tuple[str, ...]
    """Of: logp_mu, logp_sync, logp_prox, head, pre-pass (an extra forward pass of pi_theta)."""
    source: str
    loss: Callable[[TokenBatch, CorrectionConfig], PerToken]
    aggregation: str = "token-mean"
    """Used when correction.aggregation is null."""
    plan: Callable[[TokenBatch, CorrectionConfig], Mapping[str, float]] | None = field(default=None)
    lr_scale: Callable[[TokenBatch, CorrectionConfig], float] | None = field(default=None)

    @property
    def settings(self) -> tuple[str, ...]:
        """Keys of CorrectionConfig that it reads."""
        return METHOD_SETTINGS[self.name]


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "dlc",
            "A [ f(pi_theta/pi_s) s(a) - (E_mu - E_pi_s)[ f(pi_theta/pi_s) s ] ]",
            ("logp_mu", "logp_sync", "head"),
            "discrepancy-lag correction",
            methods.by_token,
        ),
        Method(
            "none",
            "A s(a)",
            (),
            "GRPO (arXiv 2402.03300), asynchronous",
            methods.by_token,
        ),
        Method(
            "is",
            "A w s(a), w = pi_theta/mu",
            ("logp_mu",),
            "importance sampling",
            methods.by_level,
        ),
        Method(
            "tis",
            "A min(w, C) s(a)",
            ("logp_mu",),
            "Yao, Liu et al. 2025; OpenReview 8MHqvb4lK9",
            methods.by_level,
        ),
        *(
            Method(
                name,
                "A w 1[low <= w <= high] s(a)",
                ("logp_mu",),
                source,
                methods.by_level,
            )
            for name, source in (
                ("mis", "Liu, Li et al. 2025"),
                ("icepop", "Ring-1T report (arXiv 2510.18855)"),
            )
        ),
        Method(
            "score_centering",
            "A [ s(a) - E_mu[s] ]",
            ("logp_mu", "head"),
            "arXiv 2609.20807",
            methods.by_token,
        ),
        Method(
            "ppo",
            "grad min(r A, clip(r) A), r = pi_theta/pi_ref",
            ("logp_mu", "logp_sync"),
            "arXiv 1707.06347",
            methods.by_token,
        ),
        Method(
            "decoupled_ppo",
            "w grad min(r A, clip(r) A), w = pi_prox/mu, r = pi_theta/pi_prox",
            ("logp_mu", "logp_prox"),
            "arXiv 2505.24298; A-3PO 2512.06547",
            methods.decoupled_ppo,
        ),
        Method(
            "gspo",
            "grad min(s A, clip(s) A), s = exp mean_t log(pi_theta/pi_ref)",
            ("logp_mu", "logp_sync"),
            "arXiv 2507.18071",
            methods.gspo,
            aggregation="seq-mean-token-mean",
        ),
        Method(
            "m2po",
            "A M r s(a), mean of (log r)^2 over kept tokens <= tau",
            ("logp_mu", "pre-pass"),
            "arXiv 2510.01161",
            methods.m2po,
            plan=methods.plan_m2po,
        ),
        Method(
            "vcpo",
            "A min(W, C) s(a), W = prod_t pi_theta/mu; learning rate x sqrt(ESS)",
            ("logp_mu",),
            "arXiv 2602.17616",
            methods.vcpo,
            aggregation="seq-mean-token-mean",
            lr_scale=methods.vcpo_lr_scale,
        ),
    )
}


def surrogate_loss(method: str, batch: TokenBatch, config: CorrectionConfig) -> tuple[Tensor, Metrics]:
    """The loss to minimise (scalar) and metrics (token means) of a method on a batch.

    Partial batches add up: the losses of all micro-batches and ranks sum to the loss of the global batch
    (with `batch.plan` from the global batch for methods that plan). Raises ValueError for an unknown method,
    or settings that do not compose with it.
    """
    if method not in METHODS:
        raise ValueError(f"correction.method {method!r}: expected one of {', '.join(METHODS)}")
    chosen = METHODS[method]
    if method != config.method:
        config = CorrectionConfig.model_validate(config.model_dump() | {"method": method})
    per_token, metrics = chosen.loss(batch.without_untrained(), config)
    return aggregate(per_token, batch, config.aggregation or chosen.aggregation), metrics


def plan_batch(method: str, batch: TokenBatch, config: CorrectionConfig) -> Mapping[str, float] | None:
    """What a method wants to know of the global batch before its gradients; None for most."""
    plan = METHODS[method].plan
    return None if plan is None else plan(replace(batch, plan=None), config)


def lr_scale(method: str, batch: TokenBatch, config: CorrectionConfig) -> float:
    """Factor on the learning rate of the step, from the global batch; 1 for most methods."""
    scale = METHODS[method].lr_scale
    return 1.0 if scale is None else scale(batch, config)
