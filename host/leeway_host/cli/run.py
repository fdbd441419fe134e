"""`leeway run` and `leeway chaos`: runs on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from leeway.errors import UsageError
from leeway_host.cli.config import tell_unread
from leeway_host.cli.options import Out, Sets
from leeway_host.terminal import keep_output

if TYPE_CHECKING:
    from leeway.config import RunConfig
    from leeway_host.launch.local import Result

app = typer.Typer()


@app.command()
def run(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="YAML file of the run; optional with --resume."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps (trainer.steps).")] = None,
    samplers: Annotated[int | None, typer.Option(help="Sampler processes (sampler.replicas).")] = None,
    model: Annotated[str | None, typer.Option(help="Model name, directory or hub id (model.name).")] = None,
    out: Out = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue the run in this directory.")
    ] = None,
    resume_from: Annotated[
        int | None,
        typer.Option(min=0, metavar="STEP", help="With --resume: go back to the checkpoint of this step."),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Use this Redis server instead of starting one (redis.url)."),
    ] = None,
    sets: Sets = None,
    no_preflight: Annotated[
        bool,
        typer.Option("--no-preflight", help="Start at once, without the checks of leeway doctor CONFIG."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each step and the summary as a JSON line.")
    ] = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return at once; the run outlives the terminal (DIR/run.log)."),
    ] = False,
) -> None:
    """Run everything on this machine: Redis, controller, trainer and samplers."""
    from leeway.config.load import load_config
    from leeway_host.launch.claims import default_out
    from leeway_host.launch.local import LocalRun

    # A shell leaves the ~ of --out=~/dir as it is.
    out, resume = out and out.expanduser(), resume and resume.expanduser()
    if resume is not None and out is not None and resume != out:
        raise UsageError("--resume DIR writes to DIR: omit --out")
    if resume_from is not None and resume is None:
        raise UsageError(f"--resume-from {resume_from} needs --resume DIR, the run to continue")
    path = config or (resume / "config.yaml" if resume else None)
    if path is None:
        raise UsageError("which run? give a configuration, for example: leeway run examples/quickstart.yaml")
    given = {
        "trainer.steps": steps,
        "sampler.replicas": samplers,
        "model.name": model,
        "redis.url": redis,
    }
    resolved = load_config(path, [*(sets or []), *as_sets(given)])
    _check_passwords(resolved, path)
    if no_preflight:
        tell_unread(resolved)
    directory = resume or out or default_out(resolved)
    if detach:
        return _detach(directory, resume=resume is not None)
    keep_output()
    job = LocalRun(
        resolved,
        directory,
        resume=resume is not None,
        resume_from=resume_from,
        as_json=as_json,
        preflight=not no_preflight,
    )
    result = job.run()
    if as_json:
        typer.echo(json.dumps(result.summary))
    else:
        _show_end(result)
    raise typer.Exit(result.exit_code)


def as_sets(given: Mapping[str, Any]) -> list[str]:
    """Options as items of --set, without those that are not given."""
    # Without escapes: JSON writes an emoji as two of them, which are two characters in YAML.
    return [
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items() if value is not None
    ]


def _show_end(result: Result) -> None:
    """The files of the run and, last, why it ended and what comes next."""
    if result.summary["steps"]:
        where = result.out
        typer.echo(f"{where}/summary.json  {where}/metrics.jsonl  (plots: leeway report {where})")
    if result.exit_code:
        typer.echo(f"leeway: {result.summary['error']}", err=True)
        if reason := result.summary["reason"]:
            typer.echo(f"next: {reason['next']}", err=True)


def _detach(directory: Path, *, resume: bool) -> None:
    from leeway_host.launch.detach import detached_argv, how_to_follow, start_detached

    pid = start_detached(detached_argv(sys.argv[1:], directory, resume=resume), directory)
    typer.echo(how_to_follow(directory, pid))


def _check_passwords(config: RunConfig, path: Path) -> None:
    """The configuration that a run leaves behind has *** where a password was."""
    urls = [config.redis.url or "", *config.redis.service_urls.values()]
    if any("***@" in url for url in urls):
        raise UsageError(
            f"{path}: Redis passwords are not stored in it; give --redis or LEEWAY_REDIS__URL, and also "
            "redis.service_urls if the run used them"
        )


@app.command()
def chaos(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="YAML file of a run, preferably a small one."),
    ] = None,
    kills: Annotated[int, typer.Option(min=1, help="Number of faults to inject.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the faults.")] = 0,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Instead of a run: simulate whole runs in one process, without CONFIG."
        ),
    ] = False,
    seeds: Annotated[
        int, typer.Option(min=1, help="With --simulate: number of histories, from --seed on.")
    ] = 300,
    out: Out = None,
    faults: Annotated[
        str, typer.Option(help="Kinds of faults, separated by commas: kill, pause, cut, restart-redis.")
    ] = "kill,pause,cut,restart-redis",
    sets: Sets = None,
) -> None:
    """Run with two samplers while processes are killed, paused, cut off and restarted; verify the result."""
    if simulate:
        _simulate(seed, seeds, alone=config is None and not sets)
    if config is None:
        raise UsageError("which run? give a configuration, for example: leeway chaos examples/tiny.yaml")
    from rich.console import Console

    from leeway.config.load import load_config
    from leeway_host.launch.chaos import ChaosRun, show
    from leeway_host.launch.claims import default_out
    from leeway_host.launch.faults import KINDS, plan_faults

    asked = [kind.strip() for kind in faults.split(",")]
    if set(asked) - set(KINDS):
        raise UsageError(f"--faults {faults}: expected some of {', '.join(KINDS)}, separated by commas")
    kinds = [kind for kind in KINDS if kind in asked]
    resolved = load_config(config, sets or [])
    keep_output()
    run = ChaosRun(resolved, out or default_out(resolved), plan_faults(kills, seed, kinds))
    result = run.run()
    show(run, Console())
    raise typer.Exit(result.exit_code)


def _simulate(seed: int, seeds: int, *, alone: bool) -> NoReturn:
    if not alone:
        raise UsageError("--simulate has a configuration of its own: omit CONFIG and --set")
    # A process of its own, because clocks and connections are replaced in it. It imports the services, which
    # this package must not.
    arguments = ["--seed", str(seed), "--seeds", str(seeds)]
    done = subprocess.run([sys.executable, "-m", "leeway_simulation", *arguments], check=False)
    raise typer.Exit(done.returncode)
