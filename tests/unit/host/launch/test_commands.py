"""Command lines of services: what each is told, and that no password is among it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from leeway.config.load import build_config
from leeway_host.launch.commands import REDIS_ENV, LaunchPlan
from leeway_host.launch.fleet import plan_samplers

URL = "redis://:secret@127.0.0.1:1/0"


def plan(**sections: Any) -> LaunchPlan:
    config = build_config({"task": {"kind": "digits"}, **sections})
    return LaunchPlan(config, Path("out"), "run-1", URL, Path("model"))


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_every_service_is_told_the_run_and_gets_the_url_by_environment() -> None:
    given = plan()
    for module, command in (
        ("leeway_controller", given.controller()),
        ("leeway_trainer", given.trainer()),
        ("leeway_sampler", given.sampler(1)),
    ):
        assert command.argv[:3] == [sys.executable, "-m", module]
        assert option(command.argv, "--run") == "run-1"
        assert option(command.argv, "--redis") == f"env:{REDIS_ENV}"
        assert option(command.argv, "--metrics-port") == "0"
        assert command.env[REDIS_ENV] == URL
        assert "secret" not in " ".join(command.argv)
    assert option(given.trainer().argv, "--out") == "out"
    assert option(given.sampler(1).argv, "--id") == "sampler-1"
    assert option(given.sampler(1).argv, "--port") == "0"


def test_ports_count_up() -> None:
    given = plan(telemetry={"metrics_port": 9000}, sampler={"http_port": 8000})
    commands = [given.controller(), given.trainer(), given.sampler(0), given.sampler(1)]
    assert [option(c.argv, "--metrics-port") for c in commands] == ["9000", "9001", "9002", "9003"]
    assert [option(c.argv, "--port") for c in commands[2:]] == ["8000", "8001"]


def test_users_of_their_own_and_several_ranks() -> None:
    own = "redis://leeway-trainer:x@h:1/0"
    given = plan(redis={"url": "redis://h:1/0", "service_urls": {"trainer": own}}, trainer={"ranks": 2})
    trainer = given.trainer()
    assert trainer.env[REDIS_ENV] == own
    assert given.sampler(0).env[REDIS_ENV] == URL
    # torchrun would take our --run for one of its own options if it came before the module.
    assert trainer.argv[2:7] == ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--"]
    assert trainer.argv[7] == "leeway_trainer"


def test_the_youngest_samplers_go_first() -> None:
    assert plan_samplers(["a", "b", "c"], 1) == ({"b", "c"}, ["a"])
    assert plan_samplers(["a"], 3) == (set(), ["a"])
