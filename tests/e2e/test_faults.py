"""Kills and signals in the middle of real runs."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import redis
from e2e_support import Run, StartRun

from leeway_host.acl import SERVICES, setuser_arguments
from leeway_host.redis_server import EmbeddedRedis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DEADLY = """
import pathlib, psutil

def score(response, answer, metadata):
    victim = pathlib.Path("victim")
    if not victim.exists():
        victim.write_text(INDEX[answer])
    if victim.read_text() == INDEX[answer]:
        for process in psutil.Process().parents():
            if process.cmdline()[1:3] == ["-m", "leeway_sampler"]:
                process.kill()  # the sampler that this worker belongs to
    return 0.5

from leeway.tasks import load_task, task_config
task = load_task(task_config(kind="digits", size=8, reward="exact"))
INDEX = {task.item(i).answer: str(i) for i in range(8)}
"""
"""A reward that kills the sampler over the first item that it sees, as a native library with a fault may."""


def digests(run: Run) -> list[str]:
    """What each step trained on: prompts, in order."""
    return [row["batch/digest"] for row in run.rows()]


def test_a_killed_sampler_is_replaced_and_no_ticket_is_lost_or_doubled(start_run: StartRun) -> None:
    calm = start_run("--steps", "6", seed=3)
    code, output = calm.finish()
    assert code == 0, output
    run = start_run("--steps", "6", "--samplers", "2", seed=3)
    run.wait_for(lambda: len(run.rows()) >= 1)
    run.service("leeway_sampler", "sampler-0").send_signal(signal.SIGKILL)
    code, output = run.finish(400)
    assert code == 0, output
    assert "sampler-0 ended (killed by SIGKILL) and was restarted" in output
    assert run.summary()["steps"] == 6
    assert digests(run) == digests(calm)
    run.assert_nothing_left()


def test_a_sampler_killed_between_start_and_finish_of_an_update(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    faults = str(Path(__file__).parent / "faults")
    monkeypatch.setenv("E2E_FAULTS", "dies_while_loading")
    monkeypatch.setenv("E2E_FAULT_MARK", str(mark))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([faults, os.environ.get("PYTHONPATH", "")]))
    run = start_run("--steps", "6")
    code, output = run.finish(400)
    assert code == 0, output
    assert mark.read_text() == "killed"
    assert "sampler-0 ended (killed by SIGKILL) and was restarted" in output
    rows = run.rows()
    assert [row["weights/version"] for row in rows] == [0, 0, 1, 1, 2, 2]
    for row in rows:
        assert row["disc/abs_mean"] < 0.02, "the weights that drew it are those of the version"
    run.assert_nothing_left()


def test_the_only_sampler_killed_mid_batch(start_run: StartRun) -> None:
    run = start_run("--steps", "4", task={"size": 64}, batch={"prompts": 32, "group_size": 8})
    run.wait_for(lambda: len(run.rows()) >= 1)
    run.service("leeway_sampler").send_signal(signal.SIGKILL)
    code, output = run.finish(400)
    assert code == 0, output
    assert run.summary()["steps"] == 4
    run.assert_nothing_left()


def test_a_killed_trainer_resumes_at_its_checkpoint(start_run: StartRun) -> None:
    calm = start_run("--steps", "8", seed=4)
    assert calm.finish()[0] == 0
    run = start_run("--steps", "8", seed=4)
    run.wait_for(lambda: len(run.rows()) >= 3)
    run.service("leeway_trainer").send_signal(signal.SIGKILL)
    code, output = run.finish()
    assert code == 1, output
    assert "trainer ended (killed by SIGKILL)" in output
    assert f"leeway run --resume {run.out}" in output
    assert run.summary()["status"] == "failed"
    run.assert_nothing_left()
    before = run.rows()
    again = start_run("--resume", str(run.out), "--steps", "8", out=run.out, seed=4)
    code, output = again.finish()
    assert code == 0, output
    rows = again.rows()
    assert [row["step"] for row in rows] == list(range(8))
    assert digests(again) == digests(calm)
    epochs = [row["epoch"] for row in rows]
    assert epochs == sorted(epochs)
    assert epochs[-1] > before[0]["epoch"]
    versions = [row["weights/version"] for row in rows]
    assert versions == sorted(versions)
    again.assert_nothing_left()


def test_a_run_that_ended_before_its_first_checkpoint_starts_over(start_run: StartRun) -> None:
    run = start_run("--steps", "6", trainer={"checkpoint_every": 0})
    run.wait_for(lambda: len(run.rows()) >= 1)
    run.service("leeway_trainer").send_signal(signal.SIGKILL)
    assert run.finish()[0] == 1
    again = start_run("--resume", str(run.out), "--steps", "4", out=run.out)
    code, output = again.finish()
    assert code == 0, output
    assert [row["step"] for row in again.rows()] == list(range(4))
    again.assert_nothing_left()


def test_a_reward_that_always_fails_ends_the_run(start_run: StartRun, tmp_path: Path) -> None:
    run = start_run(task={"reward": "math:hypot"})  # takes numbers, gets text
    code, output = run.finish()
    assert code == 1, output
    assert "the reward failed on all 16 responses" in output
    run.assert_nothing_left()


def test_a_ticket_that_kills_its_samplers_is_named(start_run: StartRun, tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(DEADLY)
    run = start_run(task={"size": 8, "reward": "deadly:score"}, cwd=tmp_path)
    code, output = run.finish(500)
    assert code == 4, output
    item = (tmp_path / "victim").read_text()
    assert re.search(rf"ticket 1\.\d+\.\d+\.\d+\.\d+ \(item {item} of the data set", output), output
    deaths = re.search(r"was with (\d) samplers that died", output)
    assert deaths is not None, output
    assert int(deaths[1]) <= 4, "max_deliveries + 1"
    assert "sampler-0 ended (killed by SIGKILL) and was restarted" in output
    assert run.summary()["status"] == "failed"
    run.assert_nothing_left()


def test_samplers_that_are_stopped_again_and_again_end_nothing(start_run: StartRun) -> None:
    """Each stop is longer than sync.ticket_idle_s, and the tickets are with the other sampler by then."""
    run = start_run("--steps", "10", "--samplers", "2", sync={"ticket_idle_s": 3.0, "max_age": None})
    run.wait_for(lambda: len(run.rows()) >= 1, 300)
    for number in range(5):
        sampler = run.service("leeway_sampler", f"sampler-{number % 2}")
        done = len(run.rows())
        os.killpg(sampler.pid, signal.SIGSTOP)
        time.sleep(5.0)
        os.killpg(sampler.pid, signal.SIGCONT)
        run.wait_for(lambda done=done: len(run.rows()) > min(done, 8), 200)  # type: ignore[misc]
    code, output = run.finish(300)
    assert code == 0, output
    assert run.summary()["steps"] == 10
    assert "restarted" not in output


def test_an_engine_that_hangs_loses_its_tickets_and_its_sampler_is_replaced(start_run: StartRun) -> None:
    run = start_run("--steps", "12", sampler={"stall_timeout_s": 8.0})
    run.wait_for(lambda: len(run.rows()) >= 2, 300)
    sampler = run.service("leeway_sampler")
    (engine,) = [p for p in sampler.children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    os.kill(engine.pid, signal.SIGSTOP)  # the sampler's event loop goes on
    code, output = run.finish(400)
    assert code == 0, output
    assert "vLLM has drawn no token for" in output
    assert "the engine hangs; its tickets go to other samplers" in output
    assert run.summary()["steps"] == 12
    run.assert_nothing_left()


@pytest.mark.parametrize("who", ["samplers", "everyone"])
def test_a_run_that_hangs_says_who_holds_what(start_run: StartRun, who: str) -> None:
    run = start_run(
        *("--steps", "500", "--samplers", "2"),
        sync={"stall_timeout_s": 40.0, "ticket_idle_s": 10.0, "max_age": None},
        batch={"prompts": 16, "group_size": 8},  # so that there is always something in flight
    )
    run.wait_for(lambda: len(run.rows()) >= 2, 300)
    modules = ["leeway_sampler"] + (["leeway_controller", "leeway_trainer"] if who == "everyone" else [])
    for process in run.processes():
        if process.cmdline()[1:2] == ["-m"] and process.cmdline()[2] in modules:
            os.killpg(process.pid, signal.SIGSTOP)
    code, output = run.finish(200)
    assert code == 3, output
    assert run.summary()["status"] == "stalled"
    if who == "samplers":
        assert re.search(r"1\.\d+\.\d+\.\d+\.\d+ at sampler-[01], delivered \d times, idle", output)
        assert re.search(r"last heartbeat of sampler-[01] (\d+ s ago|too long ago)", output)
        assert re.search(
            r"samplers: none; lost: sampler-[01] \(last heartbeat \d+ s ago\)|awaited: \d+ of", output
        )
    else:
        assert "neither controller nor trainer said why; processes: controller stopped, trainer" in output
    run.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["starting", "training"])
def test_signals_leave_nothing_behind(start_run: StartRun, moment: str, number: signal.Signals) -> None:
    run = start_run("--steps", "500")
    if moment == "training":
        run.wait_for(lambda: len(run.rows()) >= 2)
    else:
        run.wait_for(lambda: (run.out / "logs" / "sampler-0.log").exists())
    run.process.send_signal(number)
    code, output = run.finish(60)
    assert code == 130, output
    assert number.name in output
    assert run.summary()["status"] == "interrupted"
    run.assert_nothing_left()


def test_a_killed_launcher_leaves_nothing_behind(start_run: StartRun) -> None:
    run = start_run("--steps", "500")
    run.wait_for(lambda: len(run.rows()) >= 1)
    run.process.kill()
    run.process.wait()
    run.assert_nothing_left(30)


def test_a_killed_controller_goes_on(start_run: StartRun) -> None:
    run = start_run("--steps", "12")
    run.wait_for(lambda: len(run.rows()) >= 2)
    run.service("leeway_controller").send_signal(signal.SIGKILL)
    code, output = run.finish()
    assert code == 0, output
    assert "controller ended (killed by SIGKILL) and was restarted" in output
    assert run.summary()["steps"] == 12
    run.assert_nothing_left()


def test_an_engine_that_dies_takes_its_sampler_along_and_is_replaced(start_run: StartRun) -> None:
    run = start_run("--steps", "12")
    run.wait_for(lambda: len(run.rows()) >= 2)
    sampler = run.service("leeway_sampler")
    engines = [p for p in sampler.children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    assert engines
    os.kill(engines[0].pid, signal.SIGKILL)
    code, output = run.finish(400)
    assert code == 0, output
    assert run.summary()["steps"] == 12
    run.assert_nothing_left()


def test_synchronous_runs_with_one_seed_consume_identical_batches(start_run: StartRun) -> None:
    runs = [start_run("--samplers", "1", sync={"max_lead": 0}, seed=11) for _ in range(1)]
    assert runs[0].finish()[0] == 0
    other = start_run("--samplers", "1", sync={"max_lead": 0}, seed=11)
    assert other.finish()[0] == 0
    assert digests(runs[0]) == digests(other)
    assert len(set(digests(other))) == len(digests(other))
    different = start_run("--samplers", "1", sync={"max_lead": 0}, seed=12)
    assert different.finish()[0] == 0
    assert digests(different) != digests(other)


@pytest.mark.parametrize("users", [False, True], ids=["one user", "a user per service"])
def test_a_redis_of_ones_own(
    start_run: StartRun, redis_server: EmbeddedRedis, client: redis.Redis, users: bool
) -> None:
    urls = {}
    for service in SERVICES if users else ():
        client.execute_command(
            "ACL", "SETUSER", f"e2e-{service}", "reset", *setuser_arguments(service, "pw-of-it")
        )
        urls[service] = f"redis://e2e-{service}:pw-of-it@127.0.0.1:{redis_server.port}/0"
    run = start_run("--redis", redis_server.url, "--samplers", "2", redis={"service_urls": urls})
    code, output = run.finish(400)
    assert code == 0, output
    assert client.dbsize() == 0
    for file in (run.out / "config.yaml", *Path(run.out / "logs").iterdir()):
        assert redis_server.password not in file.read_text()
        assert "pw-of-it" not in file.read_text()
    refused = [entry for entry in client.acl_log() if entry["username"].startswith("e2e-")]
    assert refused == [], "every service could do its work"
    run.assert_nothing_left()


def test_two_trainer_ranks_and_two_samplers(start_run: StartRun) -> None:
    run = start_run("--samplers", "2", trainer={"ranks": 2, "zero_stage": 3})
    code, output = run.finish(400)
    assert code == 0, output
    assert all(row["disc/abs_mean"] < 0.02 for row in run.rows())
    run.assert_nothing_left()
