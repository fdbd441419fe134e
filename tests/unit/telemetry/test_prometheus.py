"""Prometheus series of the services, fed from the metrics of a step and by name."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from leeway.errors import UsageError
from leeway.metrics.areas.controller import CONTROLLER_SAMPLERS, CONTROLLER_VERDICTS
from leeway.metrics.areas.sampler import SAMPLER_BUSY_SECONDS, SAMPLER_GENERATE_SECONDS, SAMPLER_RESPONSES
from leeway.metrics.areas.trainer import TRAINER_STEPS
from leeway.telemetry.prometheus import Exporter, serve_metrics
from leeway_host.redis_server import free_port


def test_a_step_feeds_gauges_counters_and_histograms() -> None:
    registry = CollectorRegistry()
    trainer = Exporter("trainer", registry)
    value = registry.get_sample_value
    for wait in (2.0, 3.0):
        trainer.record_step(
            {"tokens": 100, "time/wait_s": wait, "time/step_s": 6.0, "lag/ess_tok": 0.8, "data/digest": "f0"}
        )
    assert value("leeway_trainer_trained_tokens_total") == 200
    assert value("leeway_trainer_phase_seconds_total", {"phase": "wait"}) == 5.0
    assert value("leeway_trainer_phase_seconds_total", {"phase": "publish"}) == 0.0
    assert value("leeway_trainer_lag_ess_token_ratio") == 0.8
    assert value("leeway_trainer_step_seconds_count") == 2
    assert value("leeway_trainer_step_seconds_bucket", {"le": "10.0"}) == 2
    assert value("leeway_trainer_step_seconds_bucket", {"le": "5.0"}) == 0
    assert value("leeway_lag_ess_ratio", {"level": "token"}) is None  # the controller's
    trainer.record(TRAINER_STEPS, 1)
    assert value("leeway_trainer_steps_total") == 1


def test_the_controller_exposes_ess_by_level() -> None:
    registry = CollectorRegistry()
    controller = Exporter("controller", registry)
    controller.record_step({"lag/ess_tok": 0.9, "lag/ess_seq": 0.6, "tokens": 5})
    controller.record(CONTROLLER_VERDICTS, 1, "resync", "ess")
    controller.record(CONTROLLER_SAMPLERS, 2, "ready")
    value = registry.get_sample_value
    assert value("leeway_lag_ess_ratio", {"level": "token"}) == 0.9
    assert value("leeway_lag_ess_ratio", {"level": "sequence"}) == 0.6
    assert value("leeway_controller_verdicts_total", {"action": "resync", "reason": "ess"}) == 1
    assert value("leeway_controller_samplers", {"state": "ready"}) == 2
    assert value("leeway_trainer_trained_tokens_total") is None


def test_a_running_total_raises_a_counter_and_never_lowers_it() -> None:
    registry = CollectorRegistry()
    sampler = Exporter("sampler", registry)
    for total in (2, 5, 5, 1):
        sampler.record_total(SAMPLER_RESPONSES, total, "published")
    sampler.record_total(SAMPLER_RESPONSES, 1, "void")
    sampler.record_total(SAMPLER_BUSY_SECONDS, 2.5)
    sampler.record(SAMPLER_GENERATE_SECONDS, 0.2)
    value = registry.get_sample_value
    assert value("leeway_sampler_responses_total", {"outcome": "published"}) == 5
    assert value("leeway_sampler_responses_total", {"outcome": "void"}) == 1
    assert value("leeway_sampler_busy_seconds_total") == 2.5
    assert value("leeway_sampler_generate_seconds_bucket", {"le": "0.25"}) == 1


def test_metrics_are_served_within_the_context_and_a_port_in_use_is_an_error() -> None:
    port = free_port()
    with serve_metrics(port, "127.0.0.1"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b"python_info" in answer.read()
        with (
            pytest.raises(UsageError, match=f"telemetry.metrics_port: port {port} on 127"),
            serve_metrics(port, "127.0.0.1"),
        ):
            pass
    with serve_metrics(None), serve_metrics(0):
        pass
