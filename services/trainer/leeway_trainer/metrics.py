"""What rank 0 of the trainer shows at /metrics."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

STEPS = Counter("leeway_trainer_steps", "Optimiser steps since the start of this process")
TOKENS = Counter("leeway_trainer_trained_tokens", "Response tokens trained on")
VOIDED = Counter("leeway_trainer_voided_tokens", "Tokens of rollouts that a resync made void")
STEP_S = Histogram(
    "leeway_trainer_step_seconds",
    "From one step report to the next",
    buckets=(0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600),
)
PHASE_S = Counter("leeway_trainer_phase_seconds", "Time spent in a phase of the step", ["phase"])
PHASES = {
    "wait": "time/wait_s",
    "score": "time/score_s",
    "train": "time/train_s",
    "verdict": "time/verdict_s",
    "publish": "time/publish_s",
    "checkpoint": "time/checkpoint_s",
}
GAUGES = {
    "reward/mean": Gauge("leeway_reward_mean", "Mean reward of the last batch"),
    "response/length_mean": Gauge("leeway_response_mean_tokens", "Mean response length of the last batch"),
    "lag/ess_tok": Gauge("leeway_trainer_lag_ess_token_ratio", "ESS of the lag ratio by token, share of n"),
    "lag/ess_seq": Gauge("leeway_trainer_lag_ess_sequence_ratio", "ESS of the lag ratio by sequence"),
    "lag/clip_fraction": Gauge("leeway_trainer_lag_clipped_ratio", "Share of tokens that the clip stops"),
    "disc/abs_mean": Gauge("leeway_trainer_discrepancy_nats", "Mean of |log pi_s - log mu|"),
    "grad_norm": Gauge("leeway_trainer_gradient_norm", "Norm of the gradient before clipping"),
    "lr": Gauge("leeway_trainer_learning_rate", "Learning rate of the last step"),
}


def observe(event: str, metrics: Mapping[str, float | str]) -> None:
    """A report that is about to be written."""
    if event != "step":
        return
    STEPS.inc()
    for name, gauge in GAUGES.items():
        if name in metrics:
            gauge.set(float(metrics[name]))
    TOKENS.inc(float(metrics.get("tokens", 0.0)))
    VOIDED.inc(float(metrics.get("tokens/voided", 0.0)))
    STEP_S.observe(float(metrics.get("time/step_s", 0.0)))
    for phase, name in PHASES.items():
        PHASE_S.labels(phase).inc(float(metrics.get(name, 0.0)))
