"""`leeway status`: the state of a run, active or ended, once or until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leeway.errors import EXIT_STALLED, LeewayError
from leeway_host.cli.options import AsJson
from leeway_host.cli.target import Context, Namespace, RedisUrl, Release, RunDir, RunName, find_target

if TYPE_CHECKING:
    from leeway_host.cli.target import Target

app = typer.Typer()
WATCH_S = 2.0
CONNECT_S = 5.0


@dataclass(frozen=True)
class View:
    """What is shown. `going`: samplers have loaded weights. `ended`: nothing will change any more.

    `code`: exit status for an ended run, 0 if it completed.
    """

    text: str
    json: str
    going: bool
    ended: bool
    code: int = 0


@app.command()
def status(
    directory: RunDir = None,
    run: RunName = None,
    redis: RedisUrl = None,
    release: Release = None,
    namespace: Namespace = None,
    context: Context = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Wait until the samplers have loaded weights; else exit status 3."
        ),
    ] = 0.0,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh until the run ends; exit status 1 if it failed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a run: step, weights, samplers, or how it ended; in a cluster also its pods."""
    if directory is not None:
        read = _local_reader(directory)
    else:
        target = find_target(None, run, redis, release, namespace, context)
        read = _reader(target, max(CONNECT_S, wait))
    deadline = time.monotonic() + wait
    view = read()
    while not (view.going or view.ended) and time.monotonic() < deadline:
        time.sleep(1.0)
        view = read()
    if watch:
        view = _watch(read, view, as_json)
    else:
        typer.echo(view.json if as_json else view.text)
    if wait and not view.going:
        typer.echo(f"leeway: no sampler has loaded weights after {wait:g} s", err=True)
        raise typer.Exit(EXIT_STALLED)
    if watch:
        raise typer.Exit(view.code)


def _watch(read: Callable[[], View], view: View, as_json: bool) -> View:
    """Show every state until the run has ended: in place on a terminal, otherwise when it changes."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    if console.is_terminal and not as_json:
        with Live(Text(view.text), console=console, auto_refresh=False) as live:
            while not view.ended:
                time.sleep(WATCH_S)
                view = read()
                live.update(Text(view.text), refresh=True)
        return view
    shown = None
    while True:
        text = view.json if as_json else view.text
        if text != shown:
            typer.echo(text)
            shown = text
        if view.ended:
            return view
        time.sleep(WATCH_S)
        view = read()


def _local_reader(directory: Path) -> Callable[[], View]:
    """Reads from the run's Redis while its launcher is active, afterwards from its summary."""
    from redis import RedisError

    from leeway.streams import Keys, connect
    from leeway_host import status as module
    from leeway_host.launch.lookup import look_up

    def read() -> View:
        state = look_up(directory)
        text = "\n".join(state.describe())
        if state.pid is None:
            code = state.exit_code
            return View(text, state.as_json(), going=code == 0, ended=True, code=code)
        if state.address is None:
            return View(text, state.as_json(), going=False, ended=False)
        try:
            client = connect(state.address.redis, wait_s=CONNECT_S)
            try:
                found = module.read_status(client, Keys(state.address.run))
            finally:
                client.close()
        except (LeewayError, RedisError) as exc:  # it may be ending, or restarting its server
            return View(f"{text}\n{exc}", state.as_json(), going=False, ended=False)
        shown = "\n".join(module.describe(found, None))
        return View(shown, module.as_json(found, None), found.going, ended=False)

    return read


def _reader(target: Target, connect_s: float) -> Callable[[], View]:
    """Reads from Redis, if the target names one, and from the cluster, if it is in one."""
    from leeway.streams import Keys, RedisUnavailable, connect
    from leeway_host import status as module

    client = None
    if target.redis and target.run:
        try:
            client = connect(target.redis, wait_s=connect_s)
        except RedisUnavailable as exc:
            if target.cluster is None:
                raise
            typer.echo(f"leeway: {exc}", err=True)

    def read() -> View:
        found = None
        if client is not None and target.run:
            found = module.read_status(client, Keys(target.run))
        pods = target.cluster.pods() if target.cluster else None
        text = "\n".join(module.describe(found, pods))
        going, finished = (found.going, found.finished) if found else (False, False)
        return View(text, module.as_json(found, pods), going, ended=finished)

    return read
