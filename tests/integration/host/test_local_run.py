"""The launcher with stand-ins for the services: what it records, restarts, scales and ends with."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from leeway.config.load import build_config
from leeway.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_POISONED, EXIT_USAGE
from leeway.statuses import read_statuses
from leeway.streams import SCALE_FIELD
from leeway_host.launch.commands import Command, LaunchPlan
from leeway_host.launch.local import LocalRun, Result
from leeway_host.launch.record import read_rows
from leeway_host.redis_server import EmbeddedRedis

STAND_IN = Path(__file__).parent / "stand_in.py"


class Quick(LocalRun):
    """A run without a model; `every_pass` is called in the launcher's loop."""

    every_pass: Callable[[Quick], None] | None = None

    def prepare_model(self) -> Path:
        return self.out

    def after_pass(self) -> None:
        if self.every_pass is not None:
            self.every_pass(self)


Capture = pytest.CaptureFixture[str]
Make = Callable[..., Quick]
"""make(steps=..., step_s=..., orders={service: exit code}, **sections of the configuration)"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    original = LaunchPlan._command

    def command(self: LaunchPlan, service: str, name: str, module_and_arguments: list[str]) -> Command:
        real = original(self, service, name, module_and_arguments)
        return Command(
            [sys.executable, str(STAND_IN), service, *module_and_arguments[1:]], real.env, real.secret
        )

    monkeypatch.setattr(LaunchPlan, "_command", command)

    def make_run(
        steps: int = 4, step_s: float = 0.1, orders: dict[str, int] | None = None, **sections: Any
    ) -> Quick:
        data = {"task": {"kind": "digits"}, "sampler": {"max_restarts": 1}, "trainer": {"steps": steps}}
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        (out / "orders.json").write_text(json.dumps({"steps": steps, "step_s": step_s, **(orders or {})}))
        return Quick(build_config({**data, **sections}), out)

    return make_run


def check_end(run: Quick, result: Result, status: str, code: int) -> None:
    """The exit code and the summary agree, and nothing is left of the run."""
    assert result.exit_code == code, result.summary
    assert json.loads((run.out / "summary.json").read_text()) == result.summary
    assert result.summary["status"] == status
    assert not (run.out / ".address").exists()
    children = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p.pid for p in children if "stand_in" in str(p.cmdline())]


def test_a_run_is_recorded_from_start_to_end(make: Make) -> None:
    run = make(sampler={"replicas": 2})
    seen: list[bool] = []
    run.every_pass = lambda run: seen.append((run.out / ".address").exists())
    result = run.run()
    check_end(run, result, "completed", 0)
    assert seen and all(seen)
    rows = read_rows(run.out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["verdict/action"] == "continue" for row in rows)
    assert (run.out / "config.yaml").exists()
    logs = sorted(path.name for path in (run.out / "logs").iterdir())
    assert logs == ["controller.log", "sampler-0.log", "sampler-1.log", "trainer.log"]


@pytest.mark.parametrize(
    ("code", "exit_code", "starts"), [(7, EXIT_FAILED, 2), (2, EXIT_USAGE, 1), (4, EXIT_POISONED, 1)]
)
def test_a_sampler_that_keeps_dying_ends_the_run(make: Make, code: int, exit_code: int, starts: int) -> None:
    run = make(step_s=5.0, orders={"sampler-0": code})
    result = run.run()
    check_end(run, result, "failed", exit_code)
    assert f"sampler-0 ended (exit code {code})" in result.summary["error"]
    assert "sampler-0 is running" in result.summary["error"]  # the end of its log
    assert (run.out / "logs" / "sampler-0.log").read_text().count("is running") == starts


def test_a_sampler_that_is_killed_is_restarted(make: Make, capsys: Capture) -> None:
    run = make(steps=10)

    def kill_once(run: Quick) -> None:
        if len(run.recorder.rows) >= 2:
            run.fleet.samplers[0].signal_group(signal.SIGKILL)
            run.every_pass = None

    run.every_pass = kill_once
    check_end(run, run.run(), "completed", 0)
    assert "sampler-0 ended (killed by SIGKILL) and was restarted" in capsys.readouterr().err


def test_a_trainer_without_restarts_ends_the_run_with_a_way_on(make: Make) -> None:
    run = make(orders={"trainer": 1})
    (run.out / "checkpoints").mkdir()
    (run.out / "checkpoints" / "latest").write_text("step-000001")
    result = run.run()
    check_end(run, result, "failed", EXIT_FAILED)
    assert result.summary["reason"] == {
        "process": "trainer",
        "cause": "exit code 1 without an error message; its last line: trainer is running",
        "next": f"leeway run --resume {run.out}",
    }


def test_samplers_are_added_and_drained(make: Make, capsys: Capture) -> None:
    run = make(steps=1000)
    wanted: list[int] = []

    def scale(run: Quick) -> None:
        count = len(read_statuses(run.redis.client, run.keys, budget_s=5.0))
        for have, then in ((1, 3), (3, 1)):
            if count == have and len(wanted) == (have == 3):
                wanted.append(then)
                run.redis.client.hset(run.keys.requests, SCALE_FIELD, str(then))
                return
        if wanted == [3, 1] and count == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    run.every_pass = scale
    check_end(run, run.run(), "interrupted", EXIT_INTERRUPTED)
    assert [s.name for s in run.fleet.leaving] == ["sampler-1", "sampler-2"]  # the youngest
    printed = capsys.readouterr().err
    assert "scaled to 3 samplers" in printed and "scaled to 1 samplers" in printed


def test_a_signal_ends_the_run_with_a_summary(make: Make) -> None:
    run = make(steps=1000)
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    result = run.run()
    check_end(run, result, "interrupted", EXIT_INTERRUPTED)
    assert result.summary["error"] == "stopped by SIGTERM"


def test_an_embedded_server_that_dies_is_restarted(make: Make, capsys: Capture) -> None:
    run = make(steps=10, redis={"appendonly": True})

    def kill_once(run: Quick) -> None:
        if len(run.recorder.rows) >= 2:
            assert run.redis.embedded is not None
            run.redis.embedded.kill()
            run.every_pass = None

    run.every_pass = kill_once
    check_end(run, run.run(), "completed", 0)
    assert [row["step"] for row in read_rows(run.out / "metrics.jsonl")] == list(range(10))
    assert (
        "the Redis server ended (killed by SIGKILL) and was restarted; nothing was lost"
        in capsys.readouterr().err
    )


def test_keys_on_a_server_that_outlives_the_run_are_deleted(
    make: Make, redis_server: EmbeddedRedis, client: redis.Redis
) -> None:
    client.set("not-ours", "1")
    run = make(redis={"url": redis_server.url})
    found: list[int] = []
    run.every_pass = lambda run: found.append(len(client.keys(f"{run.keys.key('*')}")))
    check_end(run, run.run(), "completed", 0)
    assert max(found) > 0
    assert client.keys("*") == [b"not-ours"]


def test_silence_ends_the_run(make: Make) -> None:
    run = make(step_s=60.0, sync={"stall_timeout_s": 0.5}, sampler={"start_timeout_s": 0.5})
    began = time.monotonic()
    result = run.run()
    check_end(run, result, "stalled", 3)
    assert time.monotonic() - began < 30
    error = result.summary["error"]
    assert "neither controller nor trainer has said why" in error and "sampler-0" in error
