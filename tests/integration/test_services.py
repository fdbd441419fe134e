"""Child processes: groups, restarts, log tails, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from leeway_host.launch.reasons import describe_exit
from leeway_host.launch.services import Service, kill_all, stop_all
from leeway_host.redis_server import EmbeddedRedis

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def service(tmp_path: Path, code: str, restarts: int = 0) -> Service:
    return Service("s", [sys.executable, "-c", code], tmp_path / "s.log", {}, restarts)


def wait_for(condition: object, budget_s: float = 10.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + budget_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened within the budget"
        time.sleep(0.02)


def test_stop_ends_grandchildren_too(tmp_path: Path) -> None:
    parent = service(tmp_path, PARENT)
    parent.start()
    wait_for(lambda: "child" in parent.log_tail())
    child = int(parent.log_tail().split()[-1])
    stop_all([parent], grace_s=5)
    assert parent.poll() == -signal.SIGTERM
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")


def test_who_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    stubborn = service(tmp_path, STUBBORN)
    stubborn.start()
    wait_for(lambda: "ready" in stubborn.log_tail())
    began = time.monotonic()
    stop_all([stubborn], grace_s=0.3)
    assert time.monotonic() - began < 5
    assert stubborn.poll() == -signal.SIGKILL


SHARES_MEMORY = """
import time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=1000)
print("memory", memory.name, flush=True)
time.sleep(600)
"""


def test_a_kill_leaves_no_shared_memory(tmp_path: Path) -> None:
    sharing = service(tmp_path, SHARES_MEMORY)
    sharing.start()
    wait_for(lambda: "memory" in sharing.log_tail())
    memory = Path("/dev/shm") / sharing.log_tail().split()[-1]
    assert memory.exists()
    kill_all([sharing])
    assert sharing.poll() == -signal.SIGKILL
    assert not sharing.group_alive()
    assert not memory.exists()


def test_restarts_are_counted_and_kill_what_was_left(tmp_path: Path) -> None:
    parent = service(tmp_path, PARENT, restarts=1)
    parent.start()
    wait_for(lambda: "child" in parent.log_tail())
    child = int(parent.log_tail().split()[-1])
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    wait_for(lambda: parent.poll() is not None)
    assert parent.restart()
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")
    assert parent.running
    parent.signal_group(signal.SIGKILL)
    wait_for(lambda: parent.poll() is not None)
    assert not parent.restart()


def test_a_service_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from leeway_host.launch.services import Service
import sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
s = Service("s", sleeper, Path({str(tmp_path)!r}) / "s.log", {{}})
s.start()
print(s.pid, flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")


def test_descriptions() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "killed by SIGKILL"


def test_embedded_redis_refuses_strangers_and_leaves_nothing() -> None:
    import redis

    with EmbeddedRedis(maxmemory_mib=64) as server:
        pid, directory = server.pid, server.log_path.parent
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=server.port).ping()
        client = redis.Redis.from_url(server.url)
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert pid is not None
        assert server.password not in " ".join(psutil.Process(pid).cmdline())
        client.close()
    assert not psutil.pid_exists(pid)
    assert not directory.exists()


@pytest.mark.parametrize("appendonly", [True, False])
def test_a_server_that_was_killed_comes_back_with_what_it_had_on_disk(appendonly: bool) -> None:
    from leeway.streams import connect

    with EmbeddedRedis(maxmemory_mib=64, appendonly=appendonly) as server:
        client = connect(server.url)
        for number in range(100):
            client.xadd("stream", {"n": number})
        port = server.port
        server.restart()
        assert server.port == port
        again = connect(server.url)
        assert again.xlen("stream") == (100 if appendonly else 0)
        client.close()
        again.close()
