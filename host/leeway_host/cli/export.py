"""`leeway export`: a Hugging Face directory from any checkpoint of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def export(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Output directory of a run, or a checkpoint."),
    ],
    step: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="The checkpoint after N steps; default: the latest."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Default: DIR/model; with --step DIR/model-step-N."),
    ] = None,
) -> None:
    """Write the model of a checkpoint in Hugging Face format; needs no GPU and no Redis."""
    from leeway_host.launch.export import export_run

    typer.echo(str(export_run(directory, step, out)))
