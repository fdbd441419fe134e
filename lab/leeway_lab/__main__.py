"""`python -m leeway_lab`, which `leeway lab` runs: the article's experiments on a tiny model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from leeway.errors import UsageError
from leeway_host.cli.app import run_commands

app = typer.Typer(
    name="leeway lab",
    help="The article's experiments on a tiny model, with the product's own corrections.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
DEFAULT_OUT = Path("runs/lab")
Out = Annotated[Path, typer.Option(help="Directory of runs and results; finished runs are not repeated.")]


@app.command("list")
def list_experiments() -> None:
    """Names, titles and criteria of the experiments."""
    from leeway_lab.spec import experiments

    for name, experiment in experiments().items():
        quick = " (quick)" if experiment.quick else ""
        typer.echo(f"{name}{quick}: {experiment.title}\n    {experiment.criterion['text'].strip()}")


@app.command()
def run(
    names: Annotated[list[str] | None, typer.Argument(help="Default: the quick ones; --full: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick/--full", help="Some with 3 seeds, or all.")] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    seeds: Annotated[int | None, typer.Option(min=2, help="Instead of each experiment's own.")] = None,
    out: Out = DEFAULT_OUT,
) -> None:
    """Run experiments, judge them, write a report. Goes on where it was stopped."""
    from rich.console import Console
    from rich.progress import Progress

    from leeway_lab.judge import judge_all
    from leeway_lab.model import load_base
    from leeway_lab.report import write_report
    from leeway_lab.spec import QUICK_SEEDS, choose
    from leeway_lab.store import execute_all

    chosen = choose(names or [], quick)
    if quick and seeds is None:
        seeds = QUICK_SEEDS
    specs = [spec for e in chosen for runs in e.runs(seeds).values() for spec in runs]
    for model in {spec.model for spec in specs}:
        load_base(model)  # made once, not by every process
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        task = progress.add_task("runs", total=len(specs))

        def done(n: int, of: int) -> None:
            progress.update(task, total=of, completed=n)
            if not console.is_terminal and (n % 10 == 0 or n == of):
                console.print(f"{n} of {of} runs")

        execute_all(out, specs, jobs, done)
        task = progress.add_task("verdicts", total=len(chosen))
        for name, verdict in judge_all(out, chosen, seeds, jobs):
            progress.advance(task)
            console.print(f"{name}: [bold]{verdict.status}[/bold]; {verdict.text}", soft_wrap=True)
    typer.echo(str(write_report(out)))


@app.command()
def report(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where the results are.")] = DEFAULT_OUT,
) -> None:
    """Write DIR/report.html and figures from the verdicts that are there."""
    from leeway_lab.report import write_report

    if not list(out.glob("verdicts/*.json")):
        raise UsageError(f"{out} holds no verdict; run leeway lab run --out {out} first")
    typer.echo(str(write_report(out)))


if __name__ == "__main__":
    run_commands(app)
