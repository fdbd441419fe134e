"""Every correction trains a small model through the real pipeline."""

from __future__ import annotations

import pytest
from e2e_support import StartRun

from leeway.corrections.names import METHOD_NAMES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_ten_steps(start_run: StartRun, method: str) -> None:
    run = start_run("--steps", "10", correction={"method": method}, sync={"max_age": 4})
    code, output = run.finish(500)
    assert code == 0, output
    summary = run.summary()
    assert (summary["steps"], summary["method"]) == (10, method)
    assert all(row["grad_norm"] >= 0 for row in run.rows())
    run.assert_nothing_left()
