"""Lag: the trainer's weights against those that drew the batch, log pi_theta - log pi_s."""

from __future__ import annotations

from leeway.metrics.metric import Column, Metric, Plot, Series

_ESS = Series(
    "controller",
    "leeway_lag_ess_ratio",
    "gauge",
    "Effective sample size of the lag ratio, share of n",
    labels=("level",),
)

LAG_ESS_TOK = Metric(
    "lag/ess_tok",
    unit="share of n",
    help="Effective sample size of the lag ratio over tokens, from raw ratios.",
    column=Column(20, "ESS tok", ".3f"),
    status=True,
    summary="ess_token",
    series=(
        _ESS.of("token"),
        Series(
            "trainer",
            "leeway_trainer_lag_ess_token_ratio",
            "gauge",
            "ESS of the lag ratio by token, share of n",
        ),
    ),
)
LAG_ESS_SEQ = Metric(
    "lag/ess_seq",
    unit="share of n",
    help="Effective sample size of the lag ratio over responses (product over a response).",
    column=Column(30, "ESS seq", ".3f"),
    status=True,
    summary="ess_sequence",
    series=(
        _ESS.of("sequence"),
        Series(
            "trainer", "leeway_trainer_lag_ess_sequence_ratio", "gauge", "ESS of the lag ratio by sequence"
        ),
    ),
)
LAG_ESS_GEO = Metric(
    "lag/ess_geo",
    unit="share of n",
    help="Effective sample size of the geometric mean of the lag ratio over each response.",
)
LAG_VAR = Metric(
    "lag/var",
    unit="nats²",
    help="Variance of the log lag ratio over tokens.",
    summary="lag_var",
)
LAG_VAR_SEQ = Metric(
    "lag/var_seq", unit="nats²", help="Variance of the log lag ratio over responses (sum over a response)."
)
LAG_PREDICTED_ESS_TOK = Metric(
    "lag/predicted_ess_tok",
    unit="share of n",
    help="exp(-variance) over tokens: the ESS of a Gaussian log lag ratio.",
)
LAG_PREDICTED_ESS_SEQ = Metric(
    "lag/predicted_ess_seq",
    unit="share of n",
    help="exp(-variance) over responses: the ESS of a Gaussian log lag ratio.",
)
LAG_PREDICTED_CROSSING_TOK = Metric(
    "lag/predicted_crossing_tok",
    unit="steps",
    help="Age at which the ESS over tokens is forecast to reach the threshold; absent without lag.",
)
LAG_PREDICTED_CROSSING_SEQ = Metric(
    "lag/predicted_crossing_seq",
    unit="steps",
    help="Age at which the ESS over responses is forecast to reach the threshold; absent without lag.",
)
LAG_TAIL_FACTOR = Metric(
    "lag/tail_factor",
    unit="ratio",
    help="-log(ESS) / variance over tokens: 1 for a Gaussian log lag ratio, larger for a heavier tail.",
)
LAG_KL = Metric("lag/kl", unit="nats/token", help="KL(pi_s || pi_theta), k3 estimate over drawn tokens.")
LAG_CLIP_FRACTION = Metric(
    "lag/clip_fraction",
    unit="share of tokens",
    help="Share of tokens whose gradient PPO's clip with the configured range would stop, for any method.",
    plot=Plot("Clipped tokens", "Tokens whose gradient the clip of the lag ratio stops.", "clipped"),
    series=(
        Series("trainer", "leeway_trainer_lag_clipped_ratio", "gauge", "Share of tokens that the clip stops"),
    ),
)
LAG_BEYOND_20 = Metric("lag/beyond_20", unit="tokens", help="Tokens with a log lag ratio beyond 20 nats.")
LAG_ABS_MAX = Metric("lag/abs_max", unit="nats", help="Largest absolute log lag ratio of a token.")
LAG_AGE = Metric(
    "lag/age",
    unit="steps",
    help="Optimiser steps between the weights that drew the batch and those that it updated.",
    column=Column(40, "age", "d"),
    status=True,
    summary="weight_age",
    plot=Plot(
        "Staleness",
        "How far the sampler's weights are behind the trainer's.",
        "age of the sampler's weights",
        "hv",
    ),
)
ESS_BY_LEVEL = {"token": LAG_ESS_TOK, "sequence": LAG_ESS_SEQ}
"""`sync.ess_level` -> the ESS that it selects."""

METRICS = (
    LAG_ESS_TOK,
    LAG_ESS_SEQ,
    LAG_ESS_GEO,
    LAG_VAR,
    LAG_VAR_SEQ,
    LAG_PREDICTED_ESS_TOK,
    LAG_PREDICTED_ESS_SEQ,
    LAG_PREDICTED_CROSSING_TOK,
    LAG_PREDICTED_CROSSING_SEQ,
    LAG_TAIL_FACTOR,
    LAG_KL,
    LAG_CLIP_FRACTION,
    LAG_BEYOND_20,
    LAG_ABS_MAX,
    LAG_AGE,
)
