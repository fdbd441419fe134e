"""Rewards of a batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from leeway.metrics.metric import Column, Metric, Series

if TYPE_CHECKING:
    from leeway.metrics.step_data import StepData


def _mean(data: StepData) -> float:
    return math.fsum(data.rewards) / len(data.rewards)


def _std(data: StepData) -> float:
    mean = _mean(data)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in data.rewards) / len(data.rewards))


def _errors(data: StepData) -> float:
    return float(sum(rollout.header.reward_error is not None for rollout in data.rollouts))


REWARD_MEAN = Metric(
    "reward/mean",
    unit="reward",
    help="Mean reward of the batch; responses that could not be scored are included.",
    measure=_mean,
    column=Column(10, "reward", ".3f"),
    status=True,
    summary="reward",
    series=(Series("trainer", "leeway_reward_mean", "gauge", "Mean reward of the last batch"),),
)
REWARD_STD = Metric(
    "reward/std", unit="reward", help="Population standard deviation of the batch's rewards.", measure=_std
)
REWARD_ERRORS = Metric(
    "reward/errors", unit="responses", help="Responses that could not be scored.", measure=_errors
)
REWARD_ERROR = Metric(
    "reward/error",
    unit="",
    help="First error message of a reward function; absent when all responses were scored.",
)

METRICS = (REWARD_MEAN, REWARD_STD, REWARD_ERRORS, REWARD_ERROR)
