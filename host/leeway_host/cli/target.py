"""Which run a command is about: a local directory, a name on a Redis server, a release in a cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leeway.errors import UsageError
from leeway.process import PASSWORD_ENV, with_password

if TYPE_CHECKING:
    import redis

    from leeway.kube import Cluster
    from leeway.streams import Keys

RunDir = Annotated[Path | None, typer.Argument(metavar="DIR", help="Directory of a run on this machine.")]
RunName = Annotated[str | None, typer.Option("--run", envvar="LEEWAY_RUN", help="Name of the run in Redis.")]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis",
        envvar="LEEWAY_REDIS_URL",
        help=f"redis://host:port/0 of the run; its password may be in {PASSWORD_ENV}.",
    ),
]
Release = Annotated[
    str | None,
    typer.Option(
        envvar="LEEWAY_RELEASE", help="In a cluster: the release, which the names of its objects start with."
    ),
]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Namespace of the release.")]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig.")]


@dataclass(frozen=True)
class Target:
    """The run that a command is about: its address in Redis, its release in a cluster, or both."""

    run: str | None
    redis: str | None
    cluster: Cluster | None


def find_target(
    directory: Path | None,
    run: str | None,
    redis: str | None,
    release: str | None,
    namespace: str | None,
    context: str | None,
) -> Target:
    """Raises UsageError when nothing says which run is meant."""
    if directory is not None:
        from leeway_host.launch.address import find_address

        address = find_address(directory)
        return Target(address.run, address.redis, None)
    cluster = None
    if release:
        from leeway.kube import Cluster, default_namespace, load_client

        kubernetes = load_client(context)
        cluster = Cluster(release, namespace or default_namespace(), kubernetes)
    if redis and run:
        redis = with_password(redis, os.environ.get(PASSWORD_ENV))
    elif cluster is None:
        raise UsageError(
            "which run? give its DIR, or --run and --redis, or in a cluster --release (and --namespace)"
        )
    else:
        redis = None
    return Target(run, redis, cluster)


def connect_to_run(url: str, run: str) -> tuple[redis.Redis, Keys]:
    """A client and the keys of `run`. Raises UsageError when the server or the run is not there."""
    from leeway.streams import Keys, RedisUnavailable, connect

    keys = Keys(run)
    try:
        client = connect(with_password(url, os.environ.get(PASSWORD_ENV)))
    except RedisUnavailable as exc:
        raise UsageError(str(exc)) from exc
    if not client.exists(keys.state):
        raise UsageError(f"no run {run!r} on this server (there is no key {keys.state})")
    return client, keys
