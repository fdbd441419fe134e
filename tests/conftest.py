"""Fixtures that all tests share: a real server, a client, keys of a run of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import redis

from leeway.redis_server import EmbeddedRedis
from leeway.streams import Keys, connect


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
