"""One trace through all of a run, over both protocols, also when a sampler is killed."""

from __future__ import annotations

import os
import signal

import pytest
from e2e_support import StartRun
from otlp_receiver import otlp_receiver
from trace_checks import assert_broadcasts, assert_whole


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_twenty_steps_with_a_sampler_killed(
    start_run: StartRun, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc" if protocol == "grpc" else "http/protobuf"
    )
    with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", getattr(receiver, protocol))
        run = start_run("--steps", "20", "--samplers", "2", sync={"max_age": 4})
        run.wait_for(lambda: len(run.rows()) >= 6, 600)
        os.killpg(run.service("leeway_sampler", "sampler-1").pid, signal.SIGKILL)
        code, output = run.finish(900)
        assert code == 0, output
        assert_whole(receiver, 20, 16, killed="sampler-1")
        assert_broadcasts(receiver, len({row["weights/version"] for row in run.rows()}), 3)
