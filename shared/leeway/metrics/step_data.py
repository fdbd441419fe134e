"""Metrics that are computed from the data of a step, by the function that their declaration names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leeway.errors import LeewayError
from leeway.metrics.catalogue import all_metrics

if TYPE_CHECKING:
    from leeway.corrections import TokenBatch
    from leeway.messages import Rollout


class MetricError(LeewayError):
    """A metric's function failed."""


@dataclass(frozen=True)
class StepData:
    """What one optimiser step was computed from, on all ranks together.

    `tokens`: the trained tokens of the global batch, [N] float64 on the CPU and without heads, in the order
    of the micro-batches; `tokens.seq_ids` index into `rollouts`, which are in slot order. `age`: optimiser
    steps since the weights that drew the rollouts were published.
    """

    step: int
    age: int
    tokens: TokenBatch
    rollouts: Sequence[Rollout]

    @property
    def rewards(self) -> list[float]:
        """[B] reward of each response."""
        return [rollout.header.reward for rollout in self.rollouts]

    @property
    def lengths(self) -> list[int]:
        """[B] tokens of each response, including the end-of-sequence token."""
        return [int(rollout.response_ids.size) for rollout in self.rollouts]


def measure(data: StepData) -> dict[str, float]:
    """Values of all metrics that have a `measure` function; those that return None are left out.

    Raises MetricError, which names the metric, when a function fails or does not return a
    number.
    """
    values: dict[str, float] = {}
    for metric in all_metrics().values():
        if metric.measure is None:
            continue
        try:
            value = metric.measure(data)
        except Exception as exc:
            raise MetricError(
                f"step {data.step}: metric {metric} cannot be computed: {type(exc).__name__}: {exc}"
            ) from exc
        if value is None:
            continue
        if not isinstance(value, (int, float)):
            raise MetricError(
                f"step {data.step}: metric {metric} is {value!r} of type {type(value).__name__}, expected a "
                "number or None"
            )
        values[metric] = float(value)
    return values
