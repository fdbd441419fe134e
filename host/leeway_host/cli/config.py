"""`leeway config`: the resolved values of a configuration, and its JSON schema."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leeway_host.cli.options import Sets

if TYPE_CHECKING:
    from leeway.config import RunConfig

app = typer.Typer(help="The configuration of a run.", no_args_is_help=True)


@app.command("schema")
def schema() -> None:
    """Print the JSON schema of the configuration."""
    from leeway.config import RunConfig

    typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


@app.command("show")
def show(file: Annotated[Path, typer.Argument(help="YAML file of a run.")], sets: Sets = None) -> None:
    """Print the resolved values of a configuration (passwords hidden), and which of them have no effect."""
    from leeway.config.load import dump_config, load_config

    config = load_config(file, sets or [])
    typer.echo(dump_config(config), nl=False)
    tell_unread(config)


def tell_unread(config: RunConfig) -> None:
    """Print a note to stderr for each setting that is given and has no effect."""
    from leeway.config.unread import unread_settings

    for line in unread_settings(config, gpu=Path("/dev/nvidiactl").exists(), environ=os.environ):
        typer.echo(f"note: {line}", err=True)
