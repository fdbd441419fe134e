"""`python -m leeway_simulation`, which `leeway chaos --simulate` runs."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from leeway_simulation.campaign import Campaign
    from leeway_simulation.history import Outcome

MOST_BROKEN = 3
"""Broken histories after which no more are tried."""
LAST_LINES = 40
HASH_SEED = "PYTHONHASHSEED"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="Number of histories.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first history.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Print what happened in each history.")] = False,
) -> None:
    """Simulate histories of a run under faults, and verify each."""
    if os.environ.get(HASH_SEED) != "0":  # the order of sets must be the same in every replay
        os.execve(
            sys.executable, [sys.executable, "-m", __package__, *sys.argv[1:]], os.environ | {HASH_SEED: "0"}
        )
    from rich.console import Console
    from rich.progress import Progress

    from leeway_simulation.campaign import run_histories, shrink, simulated_server

    console = Console(stderr=True)
    with simulated_server() as server:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("histories", total=seeds)

            def tell(campaign: Campaign, outcome: Outcome) -> None:
                progress.advance(bar)
                if trace:
                    typer.echo("\n".join([f"seed {outcome.seed}", *outcome.log]))

            campaign = run_histories(server, range(seed, seed + seeds), MOST_BROKEN, tell)
        if as_json:
            typer.echo(json.dumps(campaign.as_dict()))
        else:
            for broken in campaign.broken:
                _show_broken(shrink(server, broken))
            _show(campaign)
    raise typer.Exit(int(bool(campaign.broken)))


def _show_broken(outcome: Outcome) -> None:
    typer.echo(f"BROKEN: seed {outcome.seed}, with {len(outcome.faults)} faults that it takes:")
    for fault in outcome.faults:
        typer.echo(f"  {fault}")
    typer.echo("what happened:")
    for line in outcome.log[-LAST_LINES:]:
        typer.echo(f"  {line}")
    typer.echo(f"again: leeway chaos --simulate --seed {outcome.seed} --seeds 1\n")


def _show(campaign: Campaign) -> None:
    found = campaign.as_dict()
    faults = ", ".join(f"{kind} {count}" for kind, count in found["faults"].items())
    typer.echo(f"faults: {faults or 'none'}")
    typer.echo(
        f"{campaign.histories} histories, {found['virtual_s']} s of virtual time, {campaign.calls} server "
        f"calls, {found['cpu_s_per_history']:.2f} s of processor time each"
    )
    if campaign.broken:
        typer.echo(f"BROKEN: seeds {', '.join(str(o.seed) for o in campaign.broken)}")
    else:
        typer.echo("holds: every batch was trained once and in order, and every run came to its end")


if __name__ == "__main__":
    app()
