"""The example metric (tests/plugin)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from leeway_example.lengths import METRICS


@pytest.mark.parametrize(("lengths", "expected"), [([2, 4, 6], 2.0), ([3, 3], 0.0), ([5], None)])
def test_length_std(lengths: list[int], expected: float | None) -> None:
    (metric,) = METRICS
    data: Any = SimpleNamespace(lengths=lengths)
    assert metric == "response/length_std" and metric.measure is not None
    assert metric.measure(data) == expected
