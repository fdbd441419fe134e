"""Keys, environment variables and ports that do not do what they seem to."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from preflight_support import config_of, text_of

from leeway_host.preflight.ports import Port, judge_ports, ports_of, why_unusable
from leeway_host.preflight.settings import unread_keys, unread_variables


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"output": {"save_batches": [1, 20]}}, ["output.save_batches", "[20]", "after step 19"]),
        ({"trainer": {"steps": 5, "warmup_steps": 5}}, ["trainer.warmup_steps=5"]),
        ({"weights": {"nccl_port": 12345}}, ["weights.nccl_port=12345 has no effect"]),
    ],
)
def test_keys_without_effect(sections: dict[str, Any], parts: list[str]) -> None:
    found = unread_keys(config_of(**sections), {})
    assert found and all(part in text_of(found) for part in parts), text_of(found)


@pytest.mark.parametrize(
    ("variables", "level", "parts"),
    [
        ({"leeway_sync__max_age": "4"}, "warning", ["leeway_sync__max_age", "write LEEWAY_SYNC__MAX_AGE"]),
        ({"LEEWAY-SYNC__MAX_AGE": "4"}, "warning", ["write LEEWAY_SYNC__MAX_AGE"]),
        ({"LEEWAY_SYNC__MAX_AGE": "4"}, "info", ["LEEWAY_SYNC__MAX_AGE replaces"]),
        ({"LEEWAY_REDIS_URL": "redis://x"}, "warning", ["LEEWAY_REDIS_URL", "LEEWAY_REDIS__URL"]),
        ({"LEEWAY_REDIS_PASSWORD": "x"}, "warning", ["LEEWAY_REDIS_PASSWORD", "redis.url"]),
    ],
)
def test_variables_that_are_mistaken(variables: dict[str, str], level: str, parts: list[str]) -> None:
    found = unread_variables(variables, config_of())
    assert [f.level for f in found] == [level]
    assert all(part in text_of(found) for part in parts), text_of(found)


def test_usual_variables_are_fine() -> None:
    assert unread_variables({"PATH": "/bin", "LEEWAY_CACHE_DIR": "/tmp/x"}, config_of()) == []


def test_ports_of_a_configuration() -> None:
    config = config_of(
        sampler={"replicas": 2, "http_port": 8000},
        telemetry={"metrics_port": 9000},
        weights={"transport": "nccl"},
    )
    numbers = [port.number for port in ports_of(config)]
    assert numbers == [8000, 8001, 9000, 9001, 9002, 9003, 29600]
    assert ports_of(config_of()) == []


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = Port("sampler.http_port", "sampler-0", "127.0.0.1", taken.getsockname()[1])
        (found,) = judge_ports([port], why_unusable)
    assert found.level == "error"
    assert f"sampler.http_port: port {port.number} of sampler-0" in found.text
    assert "another process uses it" in found.text
    assert judge_ports([port], why_unusable)[0].level == "ok"


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        (
            {"sampler": {"http_port": 9001}, "telemetry": {"metrics_port": 9000}},
            ["port 9001 of sampler-0", "telemetry.metrics_port (trainer)"],
        ),
        ({"sampler": {"http_port": 65535, "replicas": 2}}, ["port 65536 of sampler-1", "above 65535"]),
    ],
)
def test_ports_that_cannot_work(sections: dict[str, Any], parts: list[str]) -> None:
    found = judge_ports(ports_of(config_of(**sections)), lambda port: None)
    assert {f.level for f in found} == {"error"}
    assert all(part in text_of(found) for part in parts), text_of(found)


def test_an_address_that_is_not_here() -> None:
    assert why_unusable(Port("sampler.http_port", "sampler-0", "192.0.2.1", 18080))
