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

METRICS = (TOKENS, TOKENS_VOIDED, ROLLOUTS_DUPLICATES)
