"""`leeway corrections`: the methods, the settings of one, and all of them on one saved batch."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from leeway.errors import UsageError
from leeway_host.cli.options import Sets

app = typer.Typer()


@app.callback(invoke_without_command=True)
def corrections(context: typer.Context) -> None:
    """List the corrections: formula, requirements, source."""
    if context.invoked_subcommand is None:
        from leeway.corrections import METHODS

        for name in METHODS:
            _print_method(name)
        typer.echo("leeway corrections show NAME shows the settings of one.")


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="Name of a correction.")]) -> None:
    """Show one correction and its settings with their defaults."""
    from leeway.config.correction import METHOD_CHOICE
    from leeway.corrections import METHODS

    if name not in METHODS:
        raise UsageError(METHODS.unknown(name))
    _print_method(name)
    settings = METHODS[name].settings
    for key in METHOD_CHOICE.own_keys(name):
        field = settings.model_fields[key]
        about = " ".join((field.description or "").split())
        typer.echo(f"correction.{key}: {json.dumps(field.default)}  {about}".rstrip())


@app.command("compare")
def compare(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run, or one of its batches/step-*.")],
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Re-score a saved batch under every correction: gradient, cosine to dlc, ESS, clipped tokens."""
    options = [f"--set={value}" for value in sets or []] + (["--json"] if as_json else [])
    # The trainer's code; this package imports no service.
    command = [sys.executable, "-m", "leeway_trainer.compare", *options, "--", str(directory)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _print_method(name: str) -> None:
    from leeway.config.correction import METHOD_CHOICE
    from leeway.corrections import METHODS

    method, keys = METHODS[name], METHOD_CHOICE.own_keys(name)
    fields = method.settings.model_fields
    rows = {
        "estimator": method.formula,
        "needs": ", ".join(method.needs) or "nothing beyond pi_theta",
        "settings": ", ".join(f"{key}={fields[key].default}" for key in keys) or "none",
        "aggregation": method.aggregation,
        "source": method.source,
    }
    typer.echo(name)
    for key, value in rows.items():
        typer.echo(textwrap.fill(value, 84, initial_indent=f"  {key:<12}", subsequent_indent=" " * 14))
    typer.echo()
