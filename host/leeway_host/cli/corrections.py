"""`leeway corrections ...`."""

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
    """List the corrections: formula, what they need, source."""
    if context.invoked_subcommand is None:
        from leeway.corrections import METHODS

        _print_methods(list(METHODS))
        typer.echo("leeway corrections show NAME shows the settings of one.")


@app.command("show")
def corrections_show(name: Annotated[str, typer.Argument(help="Name of a correction.")]) -> None:
    """Show one correction and its settings with their defaults."""
    from leeway.config import CorrectionConfig
    from leeway.corrections import METHODS

    if name not in METHODS:
        raise UsageError(f"no correction {name!r}; there are: {', '.join(METHODS)}")
    _print_methods([name])
    for key in METHODS[name].settings:
        field = CorrectionConfig.model_fields[key]
        typer.echo(f"correction.{key}: {json.dumps(field.default)}  {field.description or ''}".rstrip())


@app.command("compare")
def corrections_compare(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run, or one of its batches/step-*.")],
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Re-score a saved batch under every correction: gradient, cosine to dlc, ESS, clipped tokens."""
    options = [f"--set={value}" for value in sets or []] + (["--json"] if as_json else [])
    # The trainer's code; this package imports no service.
    command = [sys.executable, "-m", "leeway_trainer.compare", *options, "--", str(directory)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _print_methods(names: list[str]) -> None:
    from leeway.config import CorrectionConfig
    from leeway.corrections import METHODS

    for method in (METHODS[name] for name in names):
        defaults = (f"{key}={CorrectionConfig.model_fields[key].default}" for key in method.settings)
        rows = {
            "estimator": method.formula,
            "needs": ", ".join(method.needs) or "nothing beyond pi_theta",
            "settings": ", ".join(defaults) or "none",
            "aggregation": method.aggregation,
            "source": method.source,
        }
        typer.echo(method.name)
        for key, value in rows.items():
            text = textwrap.fill(value, 84, initial_indent=f"  {key:<12}", subsequent_indent=" " * 14)
            typer.echo(text)
        typer.echo()
