"""Discrepancy: sampler and trainer on the same weights and tokens, log pi_s - log mu."""

from __future__ import annotations

from leeway.metrics.metric import Metric, MetricFamily, Series

DISC_ABS_MEAN = Metric(
    "disc/abs_mean",
    unit="nats",
    help="Mean of |log pi_s - log mu| over drawn tokens.",
    series=(Series("trainer", "leeway_trainer_discrepancy_nats", "gauge", "Mean of |log pi_s - log mu|"),),
)
DISC_MEAN = Metric("disc/mean", unit="nats", help="Mean of log pi_s - log mu over drawn tokens.")
DISC_KL = Metric(
    "disc/kl",
    unit="nats/token",
    help="KL(mu || pi_s), k3 estimate over drawn tokens.",
    summary="discrepancy_kl",
)
DISC_KL_SAMPLER = MetricFamily(
    "disc/kl/<sampler>",
    unit="nats/token",
    help="KL(mu || pi_s) of one sampler's responses, when several samplers drew the batch.",
)
DISC_ABS_MAX = Metric("disc/abs_max", unit="nats", help="Largest |log pi_s - log mu| of a token.")
DISC_BEYOND_20 = Metric(
    "disc/beyond_20", unit="tokens", help="Tokens with |log pi_s - log mu| above 20 nats."
)
DISC_RATIO_MEAN = Metric(
    "disc/ratio_mean",
    unit="ratio",
    help="Mean of pi_s / mu over drawn tokens; its expectation is 1.",
)
DISC_RATIO_STD = Metric(
    "disc/ratio_std", unit="ratio", help="Standard deviation of pi_s / mu over drawn tokens."
)

METRICS = (
    DISC_ABS_MEAN,
    DISC_MEAN,
    DISC_KL,
    DISC_KL_SAMPLER,
    DISC_ABS_MAX,
    DISC_BEYOND_20,
    DISC_RATIO_MEAN,
    DISC_RATIO_STD,
)
