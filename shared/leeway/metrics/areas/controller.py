"""What the controller exposes at /metrics."""

from __future__ import annotations

from leeway.metrics.metric import service_metric

CONTROLLER_BATCHES_ISSUED = service_metric(
    "controller",
    "controller/batches_issued",
    "batches",
    "Batches whose tickets were written, including those issued again",
    "counter",
)
CONTROLLER_VERDICTS = service_metric(
    "controller",
    "controller/verdicts",
    "verdicts",
    "Answers to step reports",
    "counter",
    labels=("action", "reason"),
)
CONTROLLER_NEXT_STEP = service_metric(
    "controller", "controller/next_step", "batch", "The batch that the trainer trains next", "gauge"
)
CONTROLLER_WEIGHT_VERSION = service_metric(
    "controller",
    "controller/weight_version",
    "version",
    "The version that all live samplers attested; -1: none",
    "gauge",
)
CONTROLLER_SAMPLERS = service_metric(
    "controller",
    "controller/samplers",
    "samplers",
    "Live samplers, by whether they take tickets",
    "gauge",
    labels=("state",),
)
CONTROLLER_RESPONSES_IN_FLIGHT = service_metric(
    "controller", "controller/responses_in_flight", "responses", "Responses that samplers work on", "gauge"
)
LAG_AGE_STEPS = service_metric(
    "controller", "lag/age_steps", "steps", "Optimiser steps that samplers are behind", "gauge"
)

METRICS = (
    CONTROLLER_BATCHES_ISSUED,
    CONTROLLER_VERDICTS,
    CONTROLLER_NEXT_STEP,
    CONTROLLER_WEIGHT_VERSION,
    CONTROLLER_SAMPLERS,
    CONTROLLER_RESPONSES_IN_FLIGHT,
    LAG_AGE_STEPS,
)
