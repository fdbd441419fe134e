"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set one value, for example --set sync.max_age=4. Repeatable."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Output directory; default: runs/<name>-<time>.")
]
