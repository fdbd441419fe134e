"""Fixtures that all tests share: a real server, a client, keys of a run of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from leeway.streams import Keys, connect
from leeway_host.redis_server import EmbeddedRedis

FUZZ = pytest.StashKey[subprocess.Popen[bytes]]()
FUZZ_OUTPUT = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz", action="store_true", help="attack every reader for a minute, beside the other tests"
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the minutes of test_fuzz.py, whose end `test_a_minute_each` awaits."""
    config = session.config
    if not config.getoption("--fuzz"):
        return
    handle, name = tempfile.mkstemp(suffix=".log", prefix="fuzz-")
    tests = str(Path(__file__).parent / "unit" / "shared" / "test_fuzz.py")
    config.stash[FUZZ_OUTPUT] = Path(name)
    config.stash[FUZZ] = subprocess.Popen(
        ["nice", "-n", "19", sys.executable, "-m", "pytest", "-m", "slow", "-p", "no:cacheprovider", tests],
        stdout=handle,
        stderr=subprocess.STDOUT,
    )
    os.close(handle)


def pytest_unconfigure(config: pytest.Config) -> None:
    if FUZZ in config.stash:
        config.stash[FUZZ].kill()
        config.stash[FUZZ].wait()
        config.stash[FUZZ_OUTPUT].unlink()


@pytest.fixture(scope="session")
def fuzzing(pytestconfig: pytest.Config) -> tuple[subprocess.Popen[bytes], Path]:
    """The process that runs the minutes, and the file with its output."""
    if FUZZ not in pytestconfig.stash:
        pytest.skip("runs with --fuzz, as make test does")
    return pytestconfig.stash[FUZZ], pytestconfig.stash[FUZZ_OUTPUT]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A Valkey or Redis server for the whole session."""
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
