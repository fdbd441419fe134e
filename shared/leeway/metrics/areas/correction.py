"""Correction: the token weights and centring terms of the method that trained the batch."""

from __future__ import annotations

from leeway.metrics.metric import Metric

WEIGHT_MEAN = Metric("weight/mean", unit="ratio", help="Mean of the method's token weights.")
WEIGHT_SQ_MEAN = Metric(
    "weight/sq_mean",
    unit="ratio²",
    help="Mean square of the method's token weights; mean² / mean square is their effective sample size.",
)
WEIGHT_CLIPPED = Metric(
    "weight/clipped", unit="share", help="Share of tokens whose weight the method's clip changes."
)
CENTER_HEAD_MASS_MU = Metric(
    "center/head_mass_mu", unit="share", help="Mean probability mass of the sampler's reported head."
)
CENTER_RHO_MU = Metric(
    "center/rho_mu",
    unit="ratio",
    help="Mean of the sampler's tail mass over the trainer's tail mass.",
)
CENTER_ABS_COEF_SUM = Metric(
    "center/abs_coef_sum",
    unit="ratio",
    help="Mean over positions of the summed absolute coefficients of the centring term.",
)
M2PO_MASKED = Metric(
    "m2po/masked", unit="share", help="Share of tokens masked by M2PO's second-moment constraint."
)

METRICS = (
    WEIGHT_MEAN,
    WEIGHT_SQ_MEAN,
    WEIGHT_CLIPPED,
    CENTER_HEAD_MASS_MU,
    CENTER_RHO_MU,
    CENTER_ABS_COEF_SUM,
    M2PO_MASKED,
)
