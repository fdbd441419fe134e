"""RewardPool: whatever a reward function does, a rollout ends with a reward, and no process stays."""

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
from leeway.tasks import load_task, task_config

HERE = Path(__file__).parent
ERROR_REWARD = -0.25


@pytest.fixture
def config(monkeypatch):
    monkeypatch.chdir(HERE)  # where reward_functions.py is found
    return task_config(
        kind="digits",
        params={"length": 4},
        reward="reward_functions:obey",
        error_reward=ERROR_REWARD,
        reward_timeout_s=1.0,
    )


async def test_every_misbehaviour_is_a_reward_with_a_reason(config):
    expected = {
        "hang": "did not end within 1 s",
        "hang-hard": "did not end within 1 s",
        "exit 0": "died while scoring (exit code 0)",
        "exit 7": "exit code 7",
        "abort": "died while scoring (SIGABRT)",
        "sys-exit": "SystemExit",
        "raise": "RuntimeError: the verifier has a bug",
        "text": "it returned 'nonsense' (str); expected one number",
        "none": "it returned None (NoneType); expected one number: is a return missing?",
        "give nan": "returned nan",
        "give inf": "returned inf",
    }
    async with RewardPool(config, workers=2) as pool:
        for response, reason in expected.items():
            result = await pool.score(0, response)
            assert result.value == ERROR_REWARD, response
            assert result.error is not None, response
            assert reason in result.error, response
            good = await pool.score(0, "give 0.5")  # the pool continues
            assert (good.value, good.error) == (0.5, None)


async def test_memory_is_limited(config):
    config = config.model_copy(update={"reward_memory_mib": 200, "reward_timeout_s": 10.0})
    async with RewardPool(config) as pool:
        for response in ("allocate 400", "allocate-for-ever"):
            result = await pool.score(0, response)
            assert result.value == ERROR_REWARD
            assert "MemoryError: it used more memory than task.reward_memory_mib" in (result.error or "")
        result = await pool.score(0, "allocate 100")  # the worker continues, and its memory is free again
        assert (result.value, result.error) == (1.0, None)


async def test_items_are_those_of_the_task(config):
    task = load_task(config)
    async with RewardPool(config) as pool:
        results = await asyncio.gather(*(pool.score(i, "answer") for i in range(20)))
    assert [r.value for r in results] == [float(task.item(i).answer) for i in range(20)]


async def test_flood_keeps_order_and_loses_nothing(config):
    responses = ["exit 1" if i % 50 == 7 else f"give {i}" for i in range(400)]
    async with RewardPool(config, workers=2, timeout_s=5) as pool:
        results = await asyncio.gather(*(pool.score(0, response) for response in responses))
    for i, result in enumerate(results):
        if i % 50 == 7:
            assert result.value == ERROR_REWARD
            assert result.error is not None
            assert "died" in result.error or "did not end" in result.error  # by which is noticed first
        else:
            assert (result.value, result.error) == (float(i), None)


async def test_hang_does_not_hold_up_the_others(config):
    async with RewardPool(config, workers=2, timeout_s=3) as pool:
        await pool.score(0, "give 1")
        hanging = asyncio.create_task(pool.score(0, "hang"))
        await asyncio.sleep(0.2)
        started = time.monotonic()
        result = await pool.score(0, "give 1")
        assert result.error is None
        assert time.monotonic() - started < 2
        assert "did not end" in ((await hanging).error or "")


async def test_workers_killed_while_idle_are_replaced(config):
    async with RewardPool(config, workers=1, timeout_s=5) as pool:
        for _ in range(3):
            pid = int((await pool.score(0, "pid")).value)
            os.kill(pid, signal.SIGKILL)  # as the kernel does when memory runs out
            await asyncio.sleep(0.5)
            result = await pool.score(0, "give 0.75")
            assert (result.value, result.error) == (0.75, None)


async def test_flood_of_instant_deaths(config):
    async with RewardPool(config, workers=1, timeout_s=2) as pool:
        results = await asyncio.gather(*(pool.score(0, "exit 1") for _ in range(12)))
        assert all(result.value == ERROR_REWARD and result.error for result in results)
        assert (await pool.score(0, "give 1")).value == 1.0


async def test_closed_pool_gives_the_error_reward(config):
    pool = RewardPool(config)
    await pool.aclose()
    result = await pool.score(0, "give 1")
    assert (result.value, result.error) == (ERROR_REWARD, "the reward pool is closed")


async def test_close_is_quick_and_leaves_no_process(config):
    pool = RewardPool(config, workers=2, timeout_s=60)
    pid = int((await pool.score(0, "pid")).value)
    assert psutil.pid_exists(pid)
    waiting = asyncio.create_task(pool.score(0, "hang"))
    await asyncio.sleep(0.3)
    started = time.monotonic()
    await pool.aclose()
    assert time.monotonic() - started < 5
    assert "closed" in ((await waiting).error or "")
    assert not psutil.pid_exists(pid)


async def test_task_that_cannot_be_loaded_in_a_worker_is_reported(config, tmp_path):
    file = tmp_path / "items.jsonl"
    gone = task_config(kind="jsonl", path=str(file))
    async with RewardPool(gone) as pool:
        result = await pool.score(0, "x")
    assert result.value == 0.0
    assert "is not a file" in (result.error or "")


def test_workers_die_with_an_owner_that_is_killed(config):
    script = textwrap.dedent(
        """
        import asyncio, sys
        from leeway.rewards import RewardPool
        from leeway.tasks.kinds.digits import DigitsConfig

        async def main():
            pool = RewardPool(DigitsConfig.model_validate_json(sys.argv[1]), workers=1)
            print(int((await pool.score(0, "pid")).value), flush=True)
            await pool.score(0, "hang")

        if __name__ == "__main__":
            asyncio.run(main())
        """
    )
    slow = config.model_copy(update={"reward_timeout_s": 600.0})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen(
        [sys.executable, "-c", script, slow.model_dump_json()],
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE,
        env=environment,
    )
    try:
        assert owner.stdout is not None
        worker = psutil.Process(int(owner.stdout.readline()))
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    gone, alive = psutil.wait_procs([worker], timeout=5)
    assert gone
    assert not alive
