"""`leeway model prepare`, which pods start with."""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from leeway_host.cli.options import ConfigFile

app = typer.Typer(help="Models.", no_args_is_help=True)


@app.command()
def prepare(
    config: ConfigFile,
    link: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Create a symbolic link to the directory.")
    ] = None,
    tokenizer_only: Annotated[
        bool, typer.Option("--tokenizer-only", help="Skip the weights of a model on the hub.")
    ] = False,
) -> None:
    """Download or build the model of a run, and print its directory."""
    from leeway.config.load import load_config
    from leeway_host.models import prepare_model
    from leeway_host.models.base import default_cache_dir

    def show(text: str) -> None:
        typer.echo(text, err=True)

    resolved = load_config(config)
    with locked(default_cache_dir(), show):
        path = prepare_model(
            resolved.model,
            task=resolved.task,
            seed=resolved.seed,
            progress=show,
            tokenizer_only=tokenizer_only,
        )
    if link is not None:
        temporary = link.with_name(f".{link.name}.new")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.resolve())
        temporary.replace(link)
    typer.echo(str(path))
    sys.stdout.flush()


@contextmanager
def locked(cache: Path, show: Callable[[str], None], budget_s: float = 3600.0) -> Iterator[None]:
    """One preparation at a time in a shared cache, so that several pods do not all do the same work.

    This only saves work: a prepared model appears in one rename. After `budget_s` seconds, or where the file
    system has no locks, it continues without the lock.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("a") as file:
        deadline, shown = time.monotonic() + budget_s, False
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not shown:
                    show(f"waiting: another process is preparing a model in {cache}")
                shown = True
                time.sleep(1.0)
            except OSError as exc:
                show(f"{cache} cannot be locked ({exc.strerror}); continuing without a lock")
                break
        yield
