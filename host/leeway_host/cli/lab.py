"""`leeway lab ...`: the arguments go to the lab's own command line."""

from __future__ import annotations

import subprocess
import sys

import typer

app = typer.Typer()


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def lab(context: typer.Context) -> None:
    """Reproduce the article's experiments on a tiny model: list, run, report."""
    # The lab imports this package, so it cannot be imported here.
    done = subprocess.run([sys.executable, "-m", "leeway_lab", *context.args], check=False)
    raise typer.Exit(done.returncode)
