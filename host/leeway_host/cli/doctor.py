"""`leeway doctor`: a configuration before its run, or the checks of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leeway.errors import EXIT_FAILED, UsageError
from leeway_host.cli.options import AsJson, Sets

if TYPE_CHECKING:
    from leeway.findings import Finding

app = typer.Typer()


@app.command()
def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="YAML file of a configuration, output directory of a run, or redis://... of an active run.",
        ),
    ] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Check this machine, without a configuration.")
    ] = False,
    engine: Annotated[
        bool,
        typer.Option(
            "--engine", help="With a configuration: also start vLLM and draw one response (about a minute)."
        ),
    ] = False,
    sets: Sets = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the active run, if the server has several (leeway run prints it)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a configuration before its run, or the data of a run.

    A YAML file: everything that can only fail late is tried now, as leeway run does before it starts
    anything; exit status 2 if something would fail. A directory or a redis:// address: every
    infrastructure check of that run; exit status 1 if one fails.
    """
    if machine:
        from leeway_host.preflight import check_machine

        _end(check_machine(), as_json)
    if target is None:
        raise UsageError(
            "which configuration or run? for example: leeway doctor examples/quickstart.yaml, or --machine"
        )
    if _is_configuration(Path(target)):
        from leeway_host.preflight.runner import check_file

        _end(check_file(Path(target), sets or [], engine=engine, progress=_progress), as_json)
    if engine or sets:
        raise UsageError(f"{target} is not a file: --engine and --set belong to a configuration (YAML)")
    _diagnose(target, name, as_json)


def _is_configuration(path: Path) -> bool:
    """True for a file. Raises UsageError for one that is not there, and for a name that can be none."""
    try:
        if path.suffix in (".yaml", ".yml") and not path.exists():
            raise UsageError(f"configuration {path} does not exist (looked in {Path.cwd()})")
        return path.is_file()
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}") from exc


def _progress(text: str) -> None:
    typer.echo(text, err=True)


def _end(findings: Sequence[Finding], as_json: bool) -> None:
    """Print the findings and exit."""
    from leeway_host.preflight import as_json as to_json
    from leeway_host.preflight import describe, exit_code

    if as_json:
        typer.echo(json.dumps(to_json(findings), indent=1))
    else:
        from rich.console import Console

        Console(soft_wrap=True, highlight=False).print(describe(findings))
    raise typer.Exit(exit_code(findings))


def _diagnose(run: str, name: str | None, as_json: bool) -> None:
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
