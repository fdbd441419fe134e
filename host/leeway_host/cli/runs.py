"""Commands about a run, finished or active: report, resync, scale. `status` is in status.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leeway.errors import UsageError
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
        client.hset(keys.requests, KEYFRAME_FIELD, "1")
    client.hset(keys.requests, MANUAL_FIELD, "1")
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
    client.hset(keys.requests, SCALE_FIELD, str(count))
    typer.echo(f"requested {count} samplers")
