"""Every correction trains the tiny example through the real pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_support import ROOT, Run

from leeway.corrections import METHODS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("method", METHODS)
def test_ten_steps(cache: Path, tmp_path: Path, method: str) -> None:
    out = tmp_path / "run"
    options = ("--steps", "10", "--set", f"correction.method={method}", "--out", str(out))
    run = Run(cache, out, ROOT / "examples/tiny.yaml", *options)
    try:
        code, output = run.finish(500)
        assert code == 0, output
        summary = run.summary()
        assert (summary["steps"], summary["method"]) == (10, method)
        assert summary["resyncs"]
        assert all(row["grad_norm"] > 0 for row in run.rows())
        run.assert_nothing_left()
    finally:
        run.kill_everything()
        run.process.wait(10)
