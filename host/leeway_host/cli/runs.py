"""Commands about a run, finished or active: report, doctor, status, resync, scale."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from leeway.errors import EXIT_FAILED, EXIT_STALLED, UsageError
from leeway_host.cli.options import AsJson
from leeway_host.cli.target import (
    Context,
    Namespace,
    RedisUrl,
    Release,
    RunDir,
    RunName,
    connect_to_run,
    find_target,
)

app = typer.Typer()
scale = typer.Typer(help="Change the size of an active run.", no_args_is_help=True)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="Output directory of a run.")]) -> None:
    """Write a self-contained HTML page with plots of a run, and print its path."""
    from leeway_host.report import write_report

    typer.echo(str(write_report(run_dir)))


@app.command()
def doctor(
    run: Annotated[str, typer.Argument(help="Output directory of a run, or redis://... of an active one.")],
    name: Annotated[
        str | None,
        typer.Option(help="Name of the run, if the server has several (leeway run prints it)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show every infrastructure check of a run; exit status 1 if one fails."""
    from leeway_host.doctor import build_table, diagnose

    diagnosis = diagnose(run, name)
    if as_json:
        typer.echo(json.dumps(diagnosis.as_dict(), indent=1))
    else:
        from rich.console import Console

        Console().print(build_table(diagnosis))
        for note in diagnosis.notes:
            typer.echo(f"note: {note}")
    raise typer.Exit(EXIT_FAILED if diagnosis.failed else 0)


@app.command()
def status(
    directory: RunDir = None,
    run: RunName = None,
    redis: RedisUrl = None,
    release: Release = None,
    namespace: Namespace = None,
    context: Context = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Wait until the samplers have loaded weights; else exit status 3."
        ),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Show the state of an active run: step, weight version, samplers; in a cluster also its pods."""
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
        typer.echo(f"leeway: no sampler has loaded weights after {wait:g} s", err=True)
        raise typer.Exit(EXIT_STALLED)


@app.command()
def resync(
    run_id: Annotated[
        str,
        typer.Argument(
            envvar="LEEWAY_RUN", help="Name of the run in Redis, which leeway run --redis prints."
        ),
    ],
    redis: Annotated[
        str,
        typer.Option(
            envvar=["LEEWAY_REDIS__URL", "LEEWAY_REDIS_URL"], help="redis://:password@host:port/0 of the run."
        ),
    ],
    keyframe: Annotated[
        bool, typer.Option("--keyframe", help="Send the weights in full instead of a delta.")
    ] = False,
) -> None:
    """Request a resync: the samplers get new weights after the current step."""
    from leeway.streams import KEYFRAME_FIELD, MANUAL_FIELD

    client, keys = connect_to_run(redis, run_id)
    if keyframe:
        client.hset(keys.state, KEYFRAME_FIELD, "1")
    client.hset(keys.state, MANUAL_FIELD, "1")
    typer.echo("the samplers get new weights after the next step report")


@scale.command("samplers")
def scale_samplers(
    count: Annotated[int, typer.Argument(min=0, help="New number of samplers.")],
    directory: RunDir = None,
    run: RunName = None,
    redis: RedisUrl = None,
    release: Release = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Add samplers, or let some drain and exit; no ticket is lost."""
    target = find_target(directory, run, redis, release, namespace, context)
    if target.cluster is not None:
        target.cluster.scale_samplers(count)
        typer.echo(f"deployment {target.cluster.prefix}-sampler: {count} replicas")
        return
    if count < 1:
        raise UsageError("scale samplers 0: a run on this machine needs at least one sampler to continue")
    from leeway.streams import SCALE_FIELD

    assert target.run is not None and target.redis is not None
    client, keys = connect_to_run(target.redis, target.run)
    client.hset(keys.state, SCALE_FIELD, str(count))
    typer.echo(f"requested {count} samplers")
