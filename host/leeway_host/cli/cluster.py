"""Commands about a run that is going on: status, scale; and `model prepare`, with which pods begin."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leeway.errors import EXIT_STALLED, UsageError
from leeway.process import PASSWORD_ENV, with_password

if TYPE_CHECKING:
    from leeway.kube import Cluster

model_app = typer.Typer(help="Models.", no_args_is_help=True)
scale_app = typer.Typer(help="Change a run's size while it trains.", no_args_is_help=True)

RunDir = Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Directory of a run on this machine.")]
RunName = Annotated[str | None, typer.Option("--run", envvar="LEEWAY_RUN", help="Name of the run in Redis.")]
RedisUrl = Annotated[
    str | None,
    typer.Option(envvar="LEEWAY_REDIS_URL", help=f"redis://host:port/0; password also in {PASSWORD_ENV}."),
]
Release = Annotated[
    str | None,
    typer.Option(envvar="LEEWAY_RELEASE", help="In a cluster: what the release's names begin with."),
]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Its namespace.")]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig.")]


@dataclass(frozen=True)
class Target:
    """The run that a command is about: its place in Redis, its release in a cluster, or both."""

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
        from leeway_host.launch.address import find_place

        place = find_place(directory)
        return Target(place.run, place.redis, None)
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


def status(
    directory: RunDir = None,
    run: RunName = None,
    redis: RedisUrl = None,
    release: Release = None,
    namespace: Namespace = None,
    context: Context = None,
    wait: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Wait until samplers hold weights; else exit code 3."),
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a run does: step, weight version, samplers, and in a cluster its pods and why they wait."""
    from leeway.streams import Keys, RedisUnavailable, connect
    from leeway_host import status as module

    target = find_target(directory, run, redis, release, namespace, context)
    deadline = time.monotonic() + wait
    found: Any = None
    if target.redis and target.run:
        try:
            client = connect(target.redis, wait_s=max(5.0, wait))
        except RedisUnavailable as exc:
            if target.cluster is None:
                raise
            typer.echo(f"leeway: {exc}", err=True)
        else:
            found = module.read_status(client, Keys(target.run))
            while not found.going and time.monotonic() < deadline:
                time.sleep(1.0)
                found = module.read_status(client, Keys(target.run))
    pods = target.cluster.pods() if target.cluster else None
    typer.echo(module.as_json(found, pods) if as_json else "\n".join(module.describe(found, pods)))
    if wait and (found is None or not found.going):
        typer.echo(f"leeway: no sampler holds weights after {wait:g} s", err=True)
        raise typer.Exit(EXIT_STALLED)


@scale_app.command("samplers")
def scale_samplers(
    count: Annotated[int, typer.Argument(min=0, help="Samplers from now on.")],
    directory: RunDir = None,
    run: RunName = None,
    redis: RedisUrl = None,
    release: Release = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Add samplers, or let some drain and leave; no ticket is lost."""
    target = find_target(directory, run, redis, release, namespace, context)
    if target.cluster is not None:
        target.cluster.scale_samplers(count)
        typer.echo(f"deployment {target.cluster.prefix}-sampler: {count} replicas")
        return
    if count < 1:
        raise UsageError("scale samplers 0: a run on this machine needs at least one sampler to go on")
    from leeway.streams import SCALE_FIELD, Keys, connect

    assert target.run is not None and target.redis is not None
    client, keys = connect(target.redis), Keys(target.run)
    if not client.exists(keys.state):
        raise UsageError(f"no run {target.run!r} on this server (there is no key {keys.state})")
    client.hset(keys.state, SCALE_FIELD, str(count))
    typer.echo(f"the run is told to have {count} samplers")


@model_app.command("prepare")
def model_prepare(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.")],
    link: Annotated[Path | None, typer.Option(help="Make this a symbolic link to the directory.")] = None,
    tokenizer_only: Annotated[bool, typer.Option(help="No weights of a model on the hub.")] = False,
) -> None:
    """Fetch or make the model of a run, and print its directory."""
    from leeway.config.load import load_config
    from leeway_host.models import prepare_model
    from leeway_host.models.prepare import default_cache_dir

    def say(text: str) -> None:
        typer.echo(text, err=True)

    resolved = load_config(config)
    with alone_in(default_cache_dir(), say):
        path = prepare_model(
            resolved.model,
            task=resolved.task,
            seed=resolved.seed,
            progress=say,
            tokenizer_only=tokenizer_only,
        )
    if link is not None:
        temporary = link.with_name(f".{link.name}.new")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.resolve())
        temporary.replace(link)
    typer.echo(str(path))
    sys.stdout.flush()


@contextmanager
def alone_in(cache: Path, say: Any, budget_s: float = 3600.0) -> Iterator[None]:
    """One preparation at a time in a shared cache, so that several pods do not all do the same work.

    Only to save work: what is prepared appears in one rename. After `budget_s`, or where the file system has
    no locks, it goes on regardless.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("a") as file:
        deadline, said = time.monotonic() + budget_s, False
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said:
                    say(f"another process prepares a model in {cache}: waiting")
                said = True
                time.sleep(1.0)
            except OSError as exc:
                say(f"{cache} cannot be locked ({exc.strerror}): going on")
                break
        yield
