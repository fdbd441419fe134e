"""The section `redis`."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from leeway.config.base import Section

Service = Literal["controller", "trainer", "sampler"]


def _is_redis_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        place = parts.hostname and parts.port != 0
    except ValueError:
        return False
    database = parts.path.strip("/")
    plain = not parts.query and not parts.fragment and (not database or database.isdecimal())
    return bool(place) and plain and parts.scheme in ("redis", "rediss")


class RedisConfig(Section):
    """The Redis or Valkey server that carries everything in flight."""

    url: str | None = None
    """`redis://[[user]:password@]host:port/db` or `rediss://...`; null: the run starts its own server."""
    service_urls: dict[Service, str] = Field(default_factory=dict)
    """URLs of services (`controller`, `trainer`, `sampler`) with separate Redis users, see
    `leeway redis acl`; other services and the launcher use `url`."""
    read_urls: list[str] = Field(default_factory=list)
    """Replicas that samplers read weights from, as `redis://host:port`; each sampler starts with a different
    one. User and password are those of `url`; data that a replica lacks is read from `url`."""
    maxmemory_mib: int = Field(default=4096, ge=64)
    """Memory limit of the run's own server, which rejects writes above it and never evicts."""
    appendonly: bool = False
    """Let the run's own server write an append-only file, so that nothing is lost if it dies; otherwise
    responses in flight are generated again."""
    socket_timeout_s: float = Field(default=5.0, ge=1)
    """Timeout of one command."""
    reconnect_s: float = Field(default=60.0, gt=0)
    """How long a process retries a lost connection before it gives up."""

    @field_validator("url", "service_urls")
    @classmethod
    def _plain_url(cls, value: Any) -> Any:
        for url in value.values() if isinstance(value, dict) else [value] if value else []:
            if not _is_redis_url(url):
                raise ValueError(
                    "expected redis://[user]:password@host:port/0 or rediss://..., without a query; / # ? @ "
                    "% in the password are written %2F %23 %3F %40 %25"
                )
        return value

    @model_validator(mode="after")
    def _users_need_a_server(self) -> RedisConfig:
        if self.service_urls and self.url is None:
            raise ValueError("redis.service_urls needs redis.url: the run's own server has no users")
        return self

    @field_validator("read_urls")
    @classmethod
    def _places(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not _is_redis_url(url) or "@" in url or urlsplit(url).path.strip("/"):
                raise ValueError(
                    "expected redis://host:port or rediss://host:port; user, password and database are those "
                    "of redis.url"
                )
        return urls
