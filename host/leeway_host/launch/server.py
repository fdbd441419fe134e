"""The Redis server of a run: one started for it, or the one that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import redis

from leeway.config import RunConfig
from leeway.config.redis import RedisConfig
from leeway.errors import UsageError
from leeway.streams import Keys, RedisUnavailable, client_name, connect
from leeway_host.acl import build_acl, user_name
from leeway_host.launch.failures import SERVER, RunFailed
from leeway_host.launch.reasons import describe_exit
from leeway_host.redis_server import EmbeddedRedis

MAX_RESTARTS = 3


@dataclass
class RunServer:
    """A connected server, as its administrator; `embedded`: None if the run did not start it."""

    config: RedisConfig
    keys: Keys
    url: str
    client: redis.Redis
    embedded: EmbeddedRedis | None
    note: Callable[[str], None]
    restarts: int = 0

    def url_of(self, service: str, name: str) -> str:
        """The URL with the user of a process: `service` says what it may do, `name` who it is.

        The run's own server has a user for each process. On another server there are those of
        redis.service_urls.
        """
        if self.embedded is None:
            urls: dict[str, str] = {str(key): url for key, url in self.config.service_urls.items()}
            return urls.get(service, self.url)
        return self.embedded.add_user(user_name(name), build_acl(service, self.keys.run, name))

    def keep_alive(self) -> None:
        """Restart the embedded server if it has ended. Raises RunFailed when that happened too often."""
        server = self.embedded
        if server is None or server.returncode is None:
            return
        ended = f"the Redis server ended ({describe_exit(server.returncode)})"
        if self.restarts >= MAX_RESTARTS:
            cause = f"{ended} {MAX_RESTARTS + 1} times"
            raise RunFailed(f"{cause}; its log:\n{server.log_tail()}", process=SERVER, cause=cause)
        self.restarts += 1
        server.restart()
        lost = "nothing was lost" if server.appendonly else "what was in flight is generated again"
        self.note(f"{ended} and was restarted; {lost}")


@contextmanager
def run_server(config: RunConfig, keys: Keys, note: Callable[[str], None]) -> Iterator[RunServer]:
    """Start or find the server of a run. Afterwards an embedded one is stopped, and keys on another deleted.

    Raises UsageError when the server cannot be reached or the password is wrong.
    """
    settings = config.redis
    with ExitStack() as stack:
        embedded, url = None, settings.url
        if url is None:
            embedded = EmbeddedRedis(maxmemory_mib=settings.maxmemory_mib, appendonly=settings.appendonly)
            stack.callback(embedded.stop)
            url = embedded.start().url
        client = _connect(config, url, keys)
        stack.callback(client.close)
        if embedded is None:
            stack.callback(_delete_keys, client, keys, note)
        yield RunServer(settings, keys, url, client, embedded, note)


def _connect(config: RunConfig, url: str, keys: Keys) -> redis.Redis:
    try:
        return connect(
            url,
            socket_timeout_s=config.redis.socket_timeout_s,
            wait_s=5.0,
            name=client_name(keys.run, "launcher"),
        )
    except RedisUnavailable as exc:
        raise UsageError(f"{exc}; start that server, or omit --redis and redis.url") from exc


def _delete_keys(client: redis.Redis, keys: Keys, note: Callable[[str], None]) -> None:
    """Remove the run's keys, which are of no use without its processes."""
    try:
        names = list(client.scan_iter(match=keys.key("*").replace("[", "\\["), count=1000))
        if names:
            client.unlink(*names)
    except redis.RedisError as exc:
        note(f"the keys of {keys.run} were left on the server: {exc}")
