"""The trainer as a process: exit codes, signals, kill and resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from other_side import OtherSide
from trainer_support import run_config

from leeway.config.load import dump_config
from leeway.events import STARTING
from leeway.messages import Event, decode

ROOT = Path(__file__).parents[3]
ENV = {
    **os.environ,
    "PYTHONPATH": f"{ROOT / 'shared'}:{ROOT / 'services/trainer'}",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}
EXIT_BUDGET_S = 120


class Process:
    """`python -m leeway_trainer`, ended with the test."""

    def __init__(self, tmp_path: Path, redis_url: str, run: str) -> None:
        self.tmp_path, self.redis_url, self.run = tmp_path, redis_url, run
        self.child: subprocess.Popen[str] | None = None

    def start(self, config, *more: str) -> None:
        path = self.tmp_path / "config.yaml"
        path.write_text(dump_config(config))
        self.child = subprocess.Popen(
            [
                *(sys.executable, "-m", "leeway_trainer", "--config", str(path), "--run", self.run),
                *("--redis", "env:TRAINER_TEST_REDIS", "--out", str(self.tmp_path / "run"), *more),
            ],
            env={**ENV, "TRAINER_TEST_REDIS": self.redis_url},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[int, str]:
        assert self.child is not None
        out, err = self.child.communicate(timeout=EXIT_BUDGET_S)
        return self.child.returncode, out + err


@pytest.fixture
def process(tmp_path, redis_server, keys):
    process = Process(tmp_path, redis_server.url, keys.run)
    yield process
    if process.child and process.child.poll() is None:
        process.child.kill()
        process.child.wait(10)


def failures(client, keys) -> list[str]:
    events = [decode(Event, fields).header for _, fields in client.xrange(keys.events)]
    return [e.text for e in events if e.name == "failed" and e.source == "trainer"]


def test_help_is_instant():
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "leeway_trainer", "--help"],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0
    assert "--resume" in done.stdout
    after = os.times()  # processor time, because other tests run beside this one
    assert after.children_user + after.children_system - before.children_user - before.children_system < 3


def test_missing_model_is_a_usage_error(process, client, keys, tmp_path):
    process.start(run_config(tmp_path / "nowhere"))
    code, log = process.finish()
    assert code == 2
    assert "cannot load a causal language model from" in log
    assert "Traceback" not in log
    assert len(failures(client, keys)) == 1
    ((_, first), *_) = client.xrange(keys.events)
    assert decode(Event, first).header.name == STARTING, "what comes now may take long"


def test_resume_from_nothing_is_a_usage_error(process, tiny_dir, tmp_path):
    process.start(run_config(tiny_dir), "--resume", str(tmp_path))
    code, log = process.finish()
    assert code == 2
    assert "no checkpoint in" in log


@pytest.mark.slow  # test_train.py has the error, without a process
def test_stall_exits_with_3_and_names_the_slots(process, tiny_dir, client, keys):
    process.start(run_config(tiny_dir, sync={"stall_timeout_s": 0.5}, sampler={"start_timeout_s": 0.5}))
    code, log = process.finish()
    assert code == 3
    assert "6 of batch 0: 0/0, 0/1" in log
    assert "tickets: none were issued" in log
    assert "6 of batch 0" in failures(client, keys)[0]


def test_sigterm_ends_it_within_seconds(process, tiny_dir, client, keys):
    config = run_config(tiny_dir, trainer={"steps": 1000, "device": "cpu"}, sync={"stall_timeout_s": 20.0})
    with OtherSide(client, keys, config) as other:
        process.start(config)
        other.wait_for(lambda: len(other.steps()) >= 2)
        process.child.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        code, log = process.finish()
    assert code == 130, log
    assert time.monotonic() - asked < 5
    assert failures(client, keys) == []
    assert "Traceback" not in log


def test_killed_and_resumed_run_continues_at_the_checkpoint(process, tiny_dir, client, keys, tmp_path):
    config = run_config(
        tiny_dir,
        trainer={"steps": 6, "device": "cpu", "checkpoint_every": 2},
        sync={"stall_timeout_s": 20.0, "max_age": 2},
    )
    with OtherSide(client, keys, config) as other:
        process.start(config)
        other.wait_for(lambda: len(other.steps()) >= 3)
        other.hold.set()
        process.child.kill()
        process.finish()
        other.hold.clear()
        before = len(other.reports)
        process.start(config, "--resume", str(tmp_path / "run"))
        code, log = process.finish()
        assert code == 0, log
        other.wait_for(lambda: other.reports[-1].event == "finished")
    started, *steps, finished = other.reports[before:]
    first = started.step
    assert started.event == "started"
    assert first in (2, 4)
    assert [r.step for r in steps] == list(range(first, 6))
    assert finished.step == 6
    assert {r.epoch for r in other.reports[before:]} == {other.reports[0].epoch + 1}
    assert client.xlen(keys.rollouts) == 0
