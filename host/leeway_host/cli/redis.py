"""`leeway redis ...`."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="The Redis server of runs.", no_args_is_help=True)


@app.command()
def acl(
    run_id: Annotated[str, typer.Option("--run", help="Name of the run, or a glob of names.")] = "*",
) -> None:
    """Print users for the server's aclfile, one per service; replace the placeholders with passwords."""
    from leeway_host.acl import USERS, acl_file

    typer.echo(acl_file({name: f"{name.upper()}_PASSWORD" for name in USERS}, run_id), nl=False)
