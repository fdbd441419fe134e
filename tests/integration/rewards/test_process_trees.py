"""What reward functions start ends with their timeout, with the pool, and with a sampler that is killed."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from leeway.rewards import RewardPool
from leeway.tasks import task_config

HERE = Path(__file__).parent
STARTS = ["plain", "own_session", "double_fork", "deaf_shell", "fork_without_exec"]
SETTINGS = {"kind": "digits", "reward": "leaving_processes:score", "reward_memory_mib": None}


@pytest.fixture(autouse=True)
def mark(monkeypatch, tmp_path):
    """Everything below a test has its mark in the environment, wherever it is in the tree of processes."""
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("LC_LEEWAY_TEST", str(tmp_path))
    return f"LC_LEEWAY_TEST={tmp_path}".encode()


def marked(mark):
    found = []
    for process in psutil.process_iter():
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            if mark in environ.split(b"\0") and process.pid != os.getpid():
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def wait_until_none(mark, budget_s=10.0):
    deadline = time.monotonic() + budget_s
    while left := [p for p in marked(mark) if p.is_running() and p.status() != "zombie"]:
        assert time.monotonic() < deadline, [p.cmdline() for p in left]
        time.sleep(0.05)


@pytest.mark.parametrize("name", STARTS)
async def test_a_timeout_ends_what_was_started(mark, name):
    async with RewardPool(task_config(**SETTINGS), timeout_s=1.5) as pool:
        await pool.score(0, "start plain and return")
        result = await pool.score(0, f"start {name} and hang")
        assert "did not end within 1.5 s and was killed, with all that it had started" in result.error
        left = [p.cmdline() for p in marked(mark) if "54321" in p.cmdline()]
        assert not left
        assert (await pool.score(0, f"start {name} and return")).value == 1.0
        assert [p for p in marked(mark) if p.status() != "zombie"]
    wait_until_none(mark, 1.0)


async def test_an_exit_ends_what_was_started(mark):
    async with RewardPool(task_config(**SETTINGS), timeout_s=5) as pool:
        result = await pool.score(0, "start double_fork and exit")
        assert result.error == "the reward worker died while scoring (exit code 3)"
        assert not [p for p in marked(mark) if "54321" in p.cmdline()]


OWNER = """
    import asyncio, sys
    from leeway.rewards import RewardPool
    from leeway.tasks import task_config

    async def main():
        pool = RewardPool(task_config(kind="digits", reward="leaving_processes:score"), workers=2)
        for name in sys.argv[1:]:
            await pool.score(0, f"start {name} and return")
        print("started", flush=True)
        await pool.score(0, "start own_session and hang")

    asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["owner", "group"])
def test_a_killed_owner_takes_everything_along(mark, how):
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), *STARTS],
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "started\n"
        time.sleep(0.5)
        assert len([p for p in marked(mark) if "54321" in p.cmdline()]) >= 5
    finally:
        if how == "owner":
            owner.send_signal(signal.SIGKILL)
        else:
            os.killpg(owner.pid, signal.SIGKILL)  # as the launcher does
        owner.wait(10)
    wait_until_none(mark)


async def test_a_cancelled_request_frees_its_worker(mark):
    async with RewardPool(task_config(**SETTINGS), timeout_s=60) as pool:
        await pool.score(0, "start plain and return")
        waiting = asyncio.create_task(pool.score(0, "start own_session and hang"))
        await asyncio.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await pool.score(0, "start plain and return")).value == 1.0


def test_no_secret_is_in_the_environment_of_a_worker_or_above_it(monkeypatch, tmp_path):
    """The worker, its parent, and an owner that has read its secret (as samplers do)."""
    script = """
        import asyncio, os, sys
        from leeway.process import secret
        from leeway.rewards import RewardPool
        from leeway.tasks import task_config

        async def main():
            url = secret("env:LEEWAY_REDIS_URL")
            assert url == "redis://:hunter2-x@host:1" and secret("env:LEEWAY_REDIS_URL") == url
            async with RewardPool(task_config(kind="digits", reward="look:score"), workers=1) as pool:
                result = await pool.score(0, "x")
                print(result.value, result.error)

        asyncio.run(main())
    """
    (tmp_path / "look.py").write_text(
        "import os, pathlib\n"
        "def score(response):\n"
        "    pid, seen = os.getpid(), [repr(dict(os.environ)).encode()]\n"
        "    for _ in range(3):\n"
        "        seen.append(pathlib.Path(f'/proc/{pid}/environ').read_bytes())\n"
        "        pid = int(pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])\n"
        "    assert all(b'PATH' in part for part in seen)\n"
        "    return sum(b'hunter2' in part for part in seen)\n"
    )
    owner = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "LEEWAY_REDIS_URL": "redis://host:1",
            "LEEWAY_REDIS_PASSWORD": "hunter2-x",
        },
        timeout=60,
    )
    assert owner.stdout == "0.0 None\n", owner.stderr
