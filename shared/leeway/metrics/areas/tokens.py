"""Amounts of data: what was trained, and what was dropped."""

from __future__ import annotations

from leeway.metrics.metric import Metric, Series

TOKENS = Metric(
    "tokens",
    unit="tokens",
    help="Response tokens trained on.",
    series=(Series("trainer", "leeway_trainer_trained_tokens", "counter", "Response tokens trained on"),),
)
TOKENS_VOIDED = Metric(
    "tokens/voided",
    unit="tokens",
    help="Tokens of rollouts that a resync made void since the step before.",
    series=(
        Series(
            "trainer", "leeway_trainer_voided_tokens", "counter", "Tokens of rollouts that a resync made void"
        ),
    ),
)
ROLLOUTS_DUPLICATES = Metric(
    "rollouts/duplicates",
    unit="responses",
    help="Rollouts dropped since the step before because their slot was already filled.",
)

ROLLOUTS_REDRAWN = Metric(
    "rollouts/redrawn",
    unit="responses",
    help="Responses of the batch that another sampler had begun: it died, was stopped, or ended before they "
    "were finished. Unless engines are bit-equal, lengths can depend on it, by at most this share of the "
    "batch.",
)

METRICS = (TOKENS, TOKENS_VOIDED, ROLLOUTS_DUPLICATES, ROLLOUTS_REDRAWN)
