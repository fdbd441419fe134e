"""Where the trainer's wall time goes, per step."""

from __future__ import annotations

from leeway.metrics.metric import Metric, Series

_PHASE = Series(
    "trainer",
    "leeway_trainer_phase_seconds",
    "counter",
    "Time spent in a phase of the step",
    labels=("phase",),
)

TIME_STEP_S = Metric(
    "time/step_s",
    unit="s",
    help="Time from one step report to the next.",
    status=True,
    series=(
        Series(
            "trainer",
            "leeway_trainer_step_seconds",
            "histogram",
            "From one step report to the next",
            buckets=(0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600),
        ),
    ),
)
TIME_WAIT_S = Metric(
    "time/wait_s", unit="s", help="Waiting for rollouts of the batch.", series=(_PHASE.of("wait"),)
)
TIME_SCORE_S = Metric(
    "time/score_s", unit="s", help="Scoring the batch with theta_s.", series=(_PHASE.of("score"),)
)
TIME_TRAIN_S = Metric(
    "time/train_s", unit="s", help="Forward, backward and optimiser.", series=(_PHASE.of("train"),)
)
TIME_VERDICT_S = Metric(
    "time/verdict_s",
    unit="s",
    help="Waiting for the controller's verdict on the step before.",
    series=(_PHASE.of("verdict"),),
)
TIME_PUBLISH_S = Metric(
    "time/publish_s",
    unit="s",
    help="Publishing weights since the step before; 0 without a resync.",
    series=(_PHASE.of("publish"),),
)
TIME_CHECKPOINT_S = Metric(
    "time/checkpoint_s",
    unit="s",
    help="Writing a checkpoint since the step before.",
    series=(_PHASE.of("checkpoint"),),
)
TIME_PREFIX_KL_S = Metric(
    "time/prefix_kl_s", unit="s", help="Scoring responses with the old and the new weights around a resync."
)

METRICS = (
    TIME_STEP_S,
    TIME_WAIT_S,
    TIME_SCORE_S,
    TIME_TRAIN_S,
    TIME_VERDICT_S,
    TIME_PUBLISH_S,
    TIME_CHECKPOINT_S,
    TIME_PREFIX_KL_S,
)
