"""Command lines of services: what each is told, and that no password is among it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from leeway.config.load import build_config
from leeway_host.launch.commands import LaunchPlan
from leeway_host.launch.fleet import plan_samplers


def url_of(service: str, name: str) -> str:
    return f"redis://{service}:secret-of-{name}@127.0.0.1:1/0"


def plan(**sections: Any) -> LaunchPlan:
    config = build_config({"task": {"kind": "digits"}, **sections})
    return LaunchPlan(config, Path("out"), "run-1", url_of, Path("model"))


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_every_service_is_told_the_run_and_reads_its_url_from_standard_input() -> None:
    given = plan()
    for name, command in (
        ("controller", given.controller()),
        ("trainer", given.trainer()),
        ("sampler-1", given.sampler(1)),
    ):
        service = name.removesuffix("-1")
        assert command.argv[:3] == [sys.executable, "-m", f"leeway_{service}"]
        assert option(command.argv, "--run") == "run-1"
        assert option(command.argv, "--redis") == "-"
        assert option(command.argv, "--metrics-port") == "0"
        assert command.secret == url_of(service, name)
        assert "secret" not in " ".join([*command.argv, *command.env.values()])
    assert option(given.trainer().argv, "--out") == "out"
    assert option(given.sampler(1).argv, "--id") == "sampler-1"
    assert option(given.sampler(1).argv, "--port") == "0"


def test_ports_count_up() -> None:
    given = plan(telemetry={"metrics_port": 9000}, sampler={"http_port": 8000})
    commands = [given.controller(), given.trainer(), given.sampler(0), given.sampler(1)]
    assert [option(c.argv, "--metrics-port") for c in commands] == ["9000", "9001", "9002", "9003"]
    assert [option(c.argv, "--port") for c in commands[2:]] == ["8000", "8001"]


def test_several_ranks() -> None:
    trainer = plan(trainer={"ranks": 2}).trainer()
    # torchrun would take our --run for one of its own options if it came before the module.
    assert trainer.argv[2:7] == ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--"]
    assert trainer.argv[7] == "leeway_trainer"


def test_the_youngest_samplers_go_first() -> None:
    assert plan_samplers(["a", "b", "c"], 1) == ({"b", "c"}, ["a"])
    assert plan_samplers(["a"], 3) == (set(), ["a"])
