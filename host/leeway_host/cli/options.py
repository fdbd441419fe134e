"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set one value, for example --set sync.max_age=4. Repeatable."
    ),
]
