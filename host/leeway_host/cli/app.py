"""The command `leeway`: its subcommands, and how errors end it.

Each module of this package defines some of the subcommands. They import heavy modules inside the commands, so
that --help is instant.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from leeway.errors import EXIT_FAILED, EXIT_INTERRUPTED, LeewayError
from leeway_host.cli import bench, config, corrections, doctor, export, lab, model, redis, run, runs, status
from leeway_host.terminal import open_standard_files

LOG_LEVEL_ENV = "LEEWAY_TELEMETRY__LOG_LEVEL"

app = typer.Typer(
    name="leeway",
    help="Asynchronous RL training for language models that stays on-policy by measurement.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for theme in (run, status, doctor, runs, export, lab):
    app.add_typer(theme.app)
app.add_typer(runs.scale, name="scale")
app.add_typer(config.app, name="config")
app.add_typer(corrections.app, name="corrections")
app.add_typer(model.app, name="model")
app.add_typer(redis.app, name="redis")
app.add_typer(bench.app, name="bench")


def _version(value: bool) -> None:
    if value:
        from leeway import __version__

        typer.echo(f"leeway {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    return


def main() -> None:
    """Entry point of the command `leeway`."""
    open_standard_files()
    # No process that a command starts imports from the working directory.
    os.environ["PYTHONSAFEPATH"] = "1"
    logging.basicConfig(level=logging.ERROR, format="leeway: %(message)s")
    run_commands(app)


def run_commands(commands: typer.Typer) -> None:
    """Run a command line; an error becomes one message and its exit code."""
    try:
        commands()
    except LeewayError as exc:
        typer.echo(f"leeway: {exc}", err=True)
        sys.exit(exc.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as exc:
        if os.environ.get(LOG_LEVEL_ENV) == "DEBUG":
            raise
        typer.echo(f"leeway: {type(exc).__name__}: {exc} (traceback: {LOG_LEVEL_ENV}=DEBUG)", err=True)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
