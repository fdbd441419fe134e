"""Fixtures that all tests share (a Redis server, a client, keys for a run), and how tests run in parallel."""

from __future__ import annotations

import gc
import os
import signal
import socket
import uuid
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

# Before torch and numpy are imported. The models of the tests are tiny, and on busy cores a second thread
# makes the first one wait. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import redis

from leeway.streams import Keys, connect
from leeway_host.redis_server import EmbeddedRedis
from parallel import start_order, unit_of

# A busy machine makes examples slow without making them wrong; attacks measure their processor time.
hypothesis.settings.register_profile(
    "leeway", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("leeway")
gc.disable()  # until the tests are collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest units first. Within a unit the order stays as written."""
    items.sort(key=lambda item: start_order(item.nodeid))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what the modules of the tests imported is not searched for garbage again and again
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule by unit: the whole unit runs on one worker."""
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False  # keep the order of pytest_collection_modifyitems
    return ByUnit(config, log)


def worker_number() -> int:
    """Number of this pytest-xdist worker; 0 without workers."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


@pytest.fixture
def own_signals() -> Iterator[None]:
    """SIGHUP and SIGINT as a terminal leaves them: `nohup` and `make test &` have them ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def ports() -> Iterator[int]:
    """Loopback ports, each the first of four free ones that no other worker uses."""

    def free(port: int) -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) != 0

    first = 20_000 + 500 * worker_number()  # below the range of outgoing connections
    return (port for port in count(first, 4) if all(map(free, range(port, port + 4))))


@pytest.fixture(scope="session")
def shared_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this session that all workers see. What is put there must bear two writers."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A Valkey or Redis server for the whole session; each worker has its own."""
    with EmbeddedRedis(maxmemory_mib=1024) as server:
        yield server


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    """A connected client; the server is emptied afterwards."""
    connection = connect(redis_server.url)
    yield connection
    connection.flushall()
    connection.close()


@pytest.fixture
def keys() -> Keys:
    """Keys of a run that no other test uses."""
    return Keys(f"t-{uuid.uuid4().hex[:8]}")
