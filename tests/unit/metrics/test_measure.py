"""Metrics that are computed from the data of a step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from leeway.metrics import Metric, StepData, measure


def data(*responses: tuple[float, int, str, str | None]) -> StepData:
    """A step of responses: (reward, tokens, finish reason, reward error)."""
    rollouts: Any = [
        SimpleNamespace(
            header=SimpleNamespace(reward=reward, finish_reason=reason, reward_error=error),
            response_ids=np.zeros(tokens, np.int32),
        )
        for reward, tokens, reason, error in responses
    ]
    tokens: Any = None
    return StepData(step=4, age=1, tokens=tokens, rollouts=rollouts)


def test_rewards_and_lengths_of_a_batch() -> None:
    step = data(
        (1.0, 3, "stop", None), (0.0, 5, "length", None), (0.5, 4, "stop", "no"), (0.5, 4, "stop", None)
    )
    assert measure(step) == {
        "reward/mean": 0.5,
        "reward/std": math.sqrt(0.125),
        "reward/errors": 1.0,
        "response/length_mean": 4.0,
        "response/length_max": 5.0,
        "response/truncated_fraction": 0.25,
    }


def use(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    def function(_: StepData) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    metric = Metric("theirs/x", unit="", help="Theirs.", measure=function)
    monkeypatch.setattr("leeway.metrics.step_data.all_metrics", lambda: {metric: metric})


def test_none_is_left_out_and_numbers_become_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    assert measure(data()) == {}
    use(monkeypatch, np.float32(2).item())
    assert measure(data()) == {"theirs/x": 2.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (KeyError("k"), r"step 4: metric theirs/x cannot be computed: KeyError: 'k'"),
        ("text", r"step 4: metric theirs/x is 'text' of type str, expected a number or None"),
    ],
)
def test_errors_name_the_metric(monkeypatch: pytest.MonkeyPatch, value: Any, message: str) -> None:
    from leeway.metrics.step_data import MetricError

    use(monkeypatch, value)
    with pytest.raises(MetricError, match=message):
        measure(data())
