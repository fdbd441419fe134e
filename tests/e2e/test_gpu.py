"""The main job on an NVIDIA GPU: vLLM and DeepSpeed share one device."""

from __future__ import annotations

import pytest
from e2e_support import StartRun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_whole_run_on_a_gpu(start_run: StartRun, zero_stage: int) -> None:
    run = start_run(
        trainer={"device": "cuda", "zero_stage": zero_stage},
        sampler={"gpu_memory_utilization": 0.3},
    )
    code, output = run.finish(500)
    assert code == 0, output
    for row in run.rows():
        assert row["disc/abs_mean"] < 0.02
        if row["lag/age"] == 0:
            assert row["lag/ess_tok"] > 0.98
    run.assert_nothing_left()
