"""The optimiser step and the trainer's throughput."""

from __future__ import annotations

from leeway.metrics.metric import Column, Metric, Series

LOSS = Metric("loss", unit="", help="Surrogate loss of the global batch.")
GRAD_NORM = Metric(
    "grad_norm",
    unit="",
    help="Norm of the gradient before clipping.",
    status=True,
    series=(
        Series("trainer", "leeway_trainer_gradient_norm", "gauge", "Norm of the gradient before clipping"),
    ),
)
LR = Metric(
    "lr",
    unit="",
    help="Learning rate of the step.",
    series=(Series("trainer", "leeway_trainer_learning_rate", "gauge", "Learning rate of the last step"),),
)
TRAINER_TOKENS_PER_S = Metric(
    "trainer/tokens_per_s",
    unit="tokens/s",
    help="Trained tokens over the time for scoring and training.",
    column=Column(70, "trainer tok/s", ".0f"),
)
TRAINER_BUSY_FRACTION = Metric(
    "trainer/busy_fraction", unit="share", help="Share of the step that is not spent waiting for rollouts."
)
TRAINER_STEPS = Metric(
    "trainer/steps",
    unit="steps",
    help="Optimiser steps since the trainer's process started.",
    recorded=False,
    series=(
        Series(
            "trainer", "leeway_trainer_steps", "counter", "Optimiser steps since the start of this process"
        ),
    ),
)

METRICS = (LOSS, GRAD_NORM, LR, TRAINER_TOKENS_PER_S, TRAINER_BUSY_FRACTION, TRAINER_STEPS)
