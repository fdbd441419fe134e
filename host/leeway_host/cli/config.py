"""`leeway config`: the resolved values of a configuration, and its JSON schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from leeway_host.cli.options import Sets

app = typer.Typer(help="The configuration of a run.", no_args_is_help=True)


@app.command("schema")
def schema() -> None:
    """Print the JSON schema of the configuration."""
    from leeway.config import RunConfig

    typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


@app.command("show")
def show(file: Annotated[Path, typer.Argument(help="YAML file of a run.")], sets: Sets = None) -> None:
    """Print the resolved values of a configuration (passwords hidden)."""
    from leeway.config.load import dump_config, load_config

    typer.echo(dump_config(load_config(file, sets or [])), nl=False)
