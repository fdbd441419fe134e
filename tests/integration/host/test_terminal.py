"""A run survives its terminal, and is found again: the real command with stand-ins for the services."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from leeway.errors import UsageError
from leeway_host.launch.detach import DetachError, detached_argv, how_to_follow, start_detached
from leeway_host.launch.lookup import look_up
from leeway_host.launch.record import read_rows

pytestmark = pytest.mark.usefixtures("own_signals")

LAUNCHER = Path(__file__).parent / "launcher.py"
STEPS = 5
F_SETPIPE_SZ = 1031


class Launch:
    """Starts `leeway run` in `out` with stand-ins."""

    def __init__(self, directory: Path) -> None:
        self.out, self.config = directory / "out", directory / "run.yaml"
        self.out.mkdir()
        self.config.write_text(f"task: {{kind: digits}}\ntrainer: {{steps: {STEPS}}}\n")
        self.order()

    def order(self, **orders: Any) -> None:
        given = {"steps": STEPS, "step_s": 0.3, **orders}
        (self.out / "orders.json").write_text(json.dumps(given))

    def argv(self, *more: str) -> list[str]:
        return [sys.executable, str(LAUNCHER), "run", str(self.config), "--out", str(self.out), *more]

    def start(self, *more: str, **popen: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(self.argv(*more), text=True, **popen)

    def rows(self) -> int:
        return len(read_rows(self.out / "metrics.jsonl"))

    def status(self, *more: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, str(LAUNCHER), "status", str(self.out), *more]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    def assert_complete(self) -> None:
        summary = json.loads((self.out / "summary.json").read_text())
        assert (summary["status"], summary["steps"], summary["reason"]) == ("completed", STEPS, None)
        left = [p for p in psutil.process_iter() if str(self.out) in " ".join(_command_line(p))]
        assert not left


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def until(true: Callable[[], bool], budget_s: float = 60.0) -> None:
    deadline = time.monotonic() + budget_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


@pytest.mark.parametrize(
    "number",
    [signal.SIGHUP, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM))],
)
def test_a_signal_that_the_parent_ignores_stays_ignored(launch: Launch, number: signal.Signals) -> None:
    run = launch.start(
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(number, signal.SIG_IGN),
    )
    until(lambda: launch.rows() > 0)
    run.send_signal(number)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 0, output
    launch.assert_complete()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_not_ignored_ends_the_run(launch: Launch, number: signal.Signals) -> None:
    launch.order(steps=1000)
    run = launch.start(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until(lambda: launch.rows() > 0)
    run.send_signal(number)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    assert output.splitlines()[-2] == f"leeway: stopped by {number.name}"
    assert output.splitlines()[-1].startswith("next: ")
    reason = json.loads((launch.out / "summary.json").read_text())["reason"]
    assert (reason["process"], reason["cause"]) == ("launcher", f"stopped by {number.name}")


@pytest.mark.parametrize("form", [[], pytest.param(["--json"], marks=pytest.mark.slow)])
def test_a_reader_that_goes_away(launch: Launch, form: list[str]) -> None:
    """`leeway run ... 2>&1 | head -1`"""
    run = launch.start(*form, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.stdout is not None
    run.stdout.readline()
    run.stdout.close()
    assert run.wait(60) == 0
    launch.assert_complete()


def test_a_reader_that_does_not_read(launch: Launch) -> None:
    run = launch.start("--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    fcntl.fcntl(run.stdout, F_SETPIPE_SZ, 4096)
    assert run.wait(90) == 0
    launch.assert_complete()


def test_closed_standard_files(launch: Launch) -> None:
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *launch.argv()]
    assert subprocess.run(shell, timeout=90, check=False).returncode == 0
    launch.assert_complete()
    assert "step" not in (launch.out / ".lock").read_text()  # descriptor 1 is not the first file opened


def test_a_full_disk_under_the_output(launch: Launch) -> None:
    with Path("/dev/full").open("wb") as full:
        assert launch.start(stdout=full, stderr=full).wait(90) == 0
    launch.assert_complete()


def test_a_terminal_that_goes_away(launch: Launch) -> None:
    terminal, inner = pty.openpty()
    run = launch.start(
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    os.close(inner)
    while launch.rows() == 0:
        os.read(terminal, 65536)
    os.close(terminal)
    assert run.wait(60) == 0
    launch.assert_complete()


def test_a_detached_run_is_followed_to_its_end(launch: Launch) -> None:
    launch.order(step_s=0.6)
    pid = start_detached(launch.argv(), launch.out)
    assert os.getsid(pid) == pid  # a session of its own: no terminal ends it
    state = look_up(launch.out)
    assert (state.pid, state.exit_code) == (pid, 0)
    with pytest.raises(UsageError, match=f"in use by the run of process {pid}"):
        start_detached(launch.argv(), launch.out)
    until(lambda: launch.rows() > 0)
    # Stand-ins do not write the controller's state: the run is known by its lock and address alone.
    assert launch.status().returncode == 0
    watched = launch.status("--watch")
    assert watched.returncode == 0, watched.stderr
    assert f"completed, {STEPS} steps done" in watched.stdout.splitlines()[-1]
    assert f"step {STEPS}/{STEPS}" in (launch.out / "run.log").read_text()
    shown = json.loads(launch.status("--json").stdout)
    assert shown["pid"] is None and shown["summary"]["status"] == "completed"
    launch.assert_complete()


def test_a_detached_run_that_fails_at_once_says_why(launch: Launch) -> None:
    launch.config.write_text("task: {kind: digitss}\n")
    with pytest.raises(DetachError, match="did you mean 'digits'") as caught:
        start_detached(launch.argv(), launch.out)
    assert caught.value.exit_code == 2


def test_status_of_a_failed_and_of_a_killed_run(launch: Launch) -> None:
    launch.order(trainer=7)
    launch.start(stderr=subprocess.DEVNULL).wait(60)
    told = launch.status("--watch")
    assert told.returncode == 1
    assert "failed, 0 steps done" in told.stdout and "  trainer: exit code 7" in told.stdout
    assert "  next: " in told.stdout
    launch.order(steps=1000)
    run = launch.start(stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    until(lambda: launch.rows() > 0)
    run.kill()
    run.wait(10)
    told = launch.status()
    assert "ended without a summary" in told.stdout and f"leeway run --resume {launch.out}" in told.stdout


def test_status_where_no_run_was(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run is or was active there"):
        look_up(tmp_path)


def test_the_command_of_the_detached_launcher() -> None:
    out = Path("runs/x")
    head = [sys.executable, "-P", "-m", "leeway_host"]
    given = ["run", "c.yaml", "--detach", "--steps", "3"]
    kept = ["run", "c.yaml", "--steps", "3"]
    assert detached_argv(given, out, resume=False) == [*head, *kept, "--out", "runs/x"]
    assert detached_argv([*given, "--out=a"], out, resume=False) == [*head, *kept, "--out=a"]
    assert detached_argv(["run", "--resume", "a", "--detach"], out, resume=True) == [
        *head,
        "run",
        "--resume",
        "a",
    ]
    told = how_to_follow(out, 42)
    assert "leeway status runs/x --watch" in told and "runs/x/run.log" in told and "kill 42" in told
