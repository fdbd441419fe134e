"""Connections to the server."""

from __future__ import annotations

from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    NoPermissionError,
    ReadOnlyError,
    ResponseError,
)
from redis.retry import Retry

from leeway.config.load import redact_url
from leeway.errors import UsageError
from leeway.streams.clock import set_clock
from leeway.streams.retry import RedisUnavailable, retrying


class RedisRefused(UsageError):
    """The server answered and refused: wrong password, missing permission, or not a Redis server at all."""


def connect(
    url: str, *, socket_timeout_s: float = 5.0, wait_s: float = 10.0, name: str | None = None
) -> redis.Redis:
    """A client whose PING was answered; `now` follows its server's clock from then on.

    `name` is shown by the server's CLIENT LIST (see `client_name`).

    Raises RedisRefused (wrong password, no permission, bad URL, an untrusted certificate) at once
    and RedisUnavailable after `wait_s`.
    """
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=socket_timeout_s,
            health_check_interval=15,
            client_name=name,
            driver_info=None,  # no CLIENT SETINFO, which Redis 7.0 does not know
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=1),
            # A server that became a replica: the address may lead to the new primary, but this connection
            # does not.
            retry_on_error=[ReadOnlyError],
        )
    except ValueError as exc:
        raise RedisRefused(f"redis.url {_shown(url)}: {exc}; expected redis://:password@host:port/0") from exc
    try:
        retrying(client.ping, budget_s=wait_s, what=f"connecting to {_shown(url)}")
        set_clock(retrying(client.time, budget_s=wait_s, what="reading the server's clock"))
    except InvalidResponse as exc:
        client.close()
        raise RedisRefused(
            f"{_shown(url)} does not speak Redis ({exc}): give the host and port of a Redis server"
        ) from exc
    except (AuthenticationError, NoPermissionError, ResponseError) as exc:
        client.close()
        raise RedisRefused(f"Redis at {_shown(url)} refused: {exc}; {_advice(str(exc), url)}") from exc
    except redis.ConnectionError as exc:
        client.close()
        raise RedisRefused(
            f"Redis at {_shown(url)}: {exc}; set the environment variable SSL_CERT_FILE to the "
            "certificate of its authority"
        ) from exc
    except RedisUnavailable as exc:
        client.close()
        raise RedisUnavailable(f"{exc}{_about_tls(url, str(exc))}") from exc
    return client


def _shown(url: str) -> str:
    """`url` without secrets. What stands before @ without a colon may be a password that lacks it."""
    scheme, separator, rest = redact_url(url).partition("://")
    user, at, place = rest.rpartition("@")
    return f"{scheme}{separator}{user if ':' in user or not at else '***'}{at}{place}"


def _advice(refusal: str, url: str) -> str:
    """What to do about a command that the server refused."""
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    if at and ":" not in user:
        return "what stands before @ is a user without a password; a password alone is written :password@"
    if "DB index" in refusal:
        return "the number after the port is the database, usually 0"
    if refusal.startswith("HELLO"):
        return "it expects a password: redis://:password@host:port/0"
    return "check the user and password; in a URL, special characters are written as %25 for % and so on"


def _about_tls(url: str, problem: str) -> str:
    """A remark about a server that accepts connections and does not answer in the expected protocol."""
    if not any(word in problem for word in ("Timeout", "closed", "reset", "SSL")):
        return ""
    if url.startswith("rediss:"):
        return "; does the server use TLS? without it, the address begins with redis://"
    return "; does the server use TLS? then the address begins with rediss://"


def client_name(run: str, service: str) -> str:
    """The name of a service's connections on the server."""
    return f"leeway:{run}:{service}"


def replica_url(place: str, url: str) -> str:
    """`place` (redis://host:port) with the user, password and database of the server `url`."""
    credentials, _, _ = urlsplit(url).netloc.rpartition("@")
    parts = urlsplit(place)
    netloc = f"{credentials}@{parts.netloc}" if credentials else parts.netloc
    return parts._replace(netloc=netloc, path=urlsplit(url).path).geturl()
