"""The command `leeway`. Heavy modules are imported inside the commands, so that --help is instant."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from leeway.errors import EXIT_FAILED, EXIT_INTERRUPTED, LeewayError, UsageError
from leeway.process import PASSWORD_ENV, with_password
from leeway_host.cli.bench import app as bench_app
from leeway_host.cli.cluster import model_app, scale_app, status
from leeway_host.cli.config import app as config_app
from leeway_host.cli.corrections import app as corrections_app
from leeway_host.cli.options import Sets

app = typer.Typer(
    name="leeway",
    help="Asynchronous RL training for language models that stays on-policy by measurement.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
redis_app = typer.Typer(help="The Redis server of runs.", no_args_is_help=True)
app.add_typer(redis_app, name="redis")
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
app.add_typer(corrections_app, name="corrections")

app.add_typer(model_app, name="model")
app.add_typer(scale_app, name="scale")
app.command()(status)


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


@app.command()
def run(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file of the run; optional with --resume.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps (trainer.steps).")] = None,
    samplers: Annotated[int | None, typer.Option(help="Sampler processes (sampler.replicas).")] = None,
    model: Annotated[str | None, typer.Option(help="Model name, directory or hub id (model.name).")] = None,
    out: Annotated[Path | None, typer.Option(help="Output directory; default runs/<name>-<time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this directory.")] = None,
    redis: Annotated[
        str | None, typer.Option(help="Use this server instead of one of the run's own.")
    ] = None,
    sets: Sets = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print steps and the summary as JSON lines.")
    ] = False,
) -> None:
    """Run everything on this machine: Redis, controller, trainer and samplers."""
    from leeway.config.load import load_config
    from leeway_host.launch.claims import default_out
    from leeway_host.launch.local import LocalRun

    if resume is not None and out is not None and resume != out:
        raise UsageError("--resume DIR goes on in DIR; leave --out away")
    path = config or (resume / "config.yaml" if resume else None)
    if path is None:
        raise UsageError("which run? give a configuration, for example: leeway run examples/quickstart.yaml")
    given = {
        "trainer.steps": steps,
        "sampler.replicas": samplers,
        "model.name": model,
        "redis.url": redis,
    }
    options = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    resolved = load_config(path, [*(sets or []), *options])
    places = [resolved.redis.url or "", *resolved.redis.service_urls.values()]
    if any("***@" in place for place in places):
        raise UsageError(
            f"{path}: the passwords of its Redis are not stored; give --redis or LEEWAY_REDIS__URL, and "
            "redis.service_urls again if it had any"
        )
    directory = resume or out or default_out(resolved)
    result = LocalRun(resolved, directory, resume=resume is not None, as_json=as_json).run()
    if as_json:
        typer.echo(json.dumps(result.summary))
    elif result.exit_code:
        typer.echo(f"leeway: {result.summary['error']}", err=True)
    if result.summary["steps"]:
        _say_where(result.out, as_json)
    raise typer.Exit(result.exit_code)


def _say_where(out: Path, quiet: bool) -> None:
    if not quiet:
        typer.echo(f"{out}/summary.json  {out}/metrics.jsonl  (plots: leeway report {out})")


@app.command()
def chaos(
    config: Annotated[Path, typer.Argument(help="YAML file of the run; small is best.")],
    kills: Annotated[int, typer.Option(min=1, help="Faults to inject.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the faults.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Output directory; default runs/<name>-<time>.")] = None,
    faults: Annotated[
        str, typer.Option(help="Kinds, separated by commas: kill, pause, cut, restart-redis.")
    ] = "kill,pause,cut,restart-redis",
    sets: Sets = None,
) -> None:
    """Run with two samplers while processes are killed, paused, cut off and restarted; prove what holds."""
    from rich.console import Console

    from leeway.config.load import load_config
    from leeway_host.launch.chaos import KINDS, ChaosRun, plan_faults, show
    from leeway_host.launch.claims import default_out

    asked = [kind.strip() for kind in faults.split(",")]
    kinds = [kind for kind in KINDS if kind in asked]
    if set(asked) - set(KINDS):
        raise UsageError(f"--faults {faults}: allowed are {', '.join(KINDS)}")
    resolved = load_config(config, sets or [])
    run = ChaosRun(resolved, out or default_out(resolved), plan_faults(kills, seed, kinds))
    result = run.run()
    show(run, Console())
    raise typer.Exit(result.exit_code)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="Output directory of a run.")]) -> None:
    """Write one self-contained HTML page with plots of a run."""
    from leeway_host.report import write_report

    typer.echo(str(write_report(run_dir)))


@app.command()
def doctor(
    run: Annotated[str, typer.Argument(help="Output directory of a run, or redis://... of a live one.")],
    name: Annotated[
        str | None, typer.Option(help="Which run, when the server has several (leeway run prints it).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Show every infrastructure check of a run; exit status 1 when one fails."""
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


@app.command()
def resync(
    run_id: Annotated[
        str,
        typer.Argument(
            envvar="LEEWAY_RUN", help="Name of the run in Redis, which leeway run --redis prints."
        ),
    ],
    redis: Annotated[
        str,
        typer.Option(
            envvar=["LEEWAY_REDIS__URL", "LEEWAY_REDIS_URL"], help="redis://:password@host:port/0 of the run."
        ),
    ],
    keyframe: Annotated[bool, typer.Option("--keyframe", help="Send the weights in full.")] = False,
) -> None:
    """Ask a running run for a resync of its samplers after the current step."""
    from leeway.streams import KEYFRAME_FIELD, MANUAL_FIELD, Keys, RedisUnavailable, connect

    keys = Keys(run_id)
    try:
        client = connect(with_password(redis, os.environ.get(PASSWORD_ENV)))
    except RedisUnavailable as exc:
        raise UsageError(str(exc)) from exc
    if not client.exists(keys.state):
        raise UsageError(f"no run {run_id!r} on this server (there is no key {keys.state})")
    if keyframe:
        client.hset(keys.state, KEYFRAME_FIELD, "1")
    client.hset(keys.state, MANUAL_FIELD, "1")
    typer.echo("the samplers get new weights after the next step report")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def lab(context: typer.Context) -> None:
    """Repeat the article's experiments on a tiny model: list, run, report."""
    import subprocess

    # The lab is a package of its own that this one does not import.
    done = subprocess.run([sys.executable, "-m", "leeway_lab", *context.args], check=False)
    raise typer.Exit(done.returncode)


@redis_app.command("acl")
def redis_acl(
    run_id: Annotated[str, typer.Option("--run", help="Name of the run, or a glob of names.")] = "*",
) -> None:
    """Print users for the server's aclfile, one per service; put passwords in the place of the words."""
    from leeway_host.acl import SERVICES, acl_file

    typer.echo(acl_file({name: f"{name.upper()}_PASSWORD" for name in SERVICES}, run_id), nl=False)


def main() -> None:
    """Entry point of the command `leeway`."""
    logging.basicConfig(level=logging.ERROR, format="leeway: %(message)s")
    run_commands(app)


def run_commands(commands: typer.Typer) -> None:
    """Run a command line; errors become one message and an exit code."""
    try:
        commands()
    except LeewayError as exc:
        typer.echo(f"leeway: {exc}", err=True)
        sys.exit(exc.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
