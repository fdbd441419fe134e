"""The live view of a run: a table on a terminal, otherwise one line per step, or JSON lines with --json."""

from __future__ import annotations

import json
import sys
from collections import deque
from functools import lru_cache
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leeway.metrics import Column, all_metrics
from leeway.metrics.areas.resync import SYNC_REASON, VERDICT_ACTION

Row = dict[str, Any]


class View(Protocol):
    """Where a run shows its progress."""

    def status(self, text: str) -> None:
        """Replace the status line."""

    def note(self, text: str) -> None:
        """Print a line that stays on screen: a restart, a lost sampler."""

    def row(self, row: Row) -> None:
        """Show a step that was trained."""

    def close(self) -> None:
        """End the view; no calls follow."""


@lru_cache(maxsize=1)
def columns() -> tuple[tuple[str, Column], ...]:
    """(metric, column) in the order of the table."""
    shown = ((metric, metric.column) for metric in all_metrics().values())
    found = [(str(metric), column) for metric, column in shown if column is not None]
    return tuple(sorted(found, key=lambda entry: entry[1].place))


def cell(row: Row, metric: str, form: str) -> str:
    """A metric of a row as text; `-` if it is missing or not a number."""
    value = row.get(metric)
    return format(int(value) if form == "d" else value, form) if isinstance(value, (int, float)) else "-"


def verdict_text(row: Row) -> str:
    """`continue`, or `resync (ess)`."""
    action = row.get(VERDICT_ACTION) or "-"
    reason = row.get(SYNC_REASON)
    return f"{action} ({reason})" if reason else str(action)


class LiveView:
    """A table on a terminal, refreshed four times a second."""

    def __init__(self, console: Console, steps: int, keep: int = 20) -> None:
        self.steps = steps
        self.rows: deque[Row] = deque(maxlen=keep)
        self.line = ""
        self.live = Live(console=console, refresh_per_second=4, get_renderable=self.render)
        self.live.start()

    def render(self) -> RenderableType:
        table = Table(title=f"{len(self.rows) and self.rows[-1]['step'] + 1} of {self.steps} steps")
        for title in ("step", *(column.title for _, column in columns())):
            table.add_column(title, justify="right")
        table.add_column("verdict")
        for row in self.rows:
            style = "yellow" if row.get(VERDICT_ACTION) == "resync" else None
            cells = [cell(row, metric, column.form) for metric, column in columns()]
            table.add_row(str(row["step"] + 1), *cells, verdict_text(row), style=style)
        return Group(table, Text(self.line, style="dim"))

    def status(self, text: str) -> None:
        self.line = text

    def note(self, text: str) -> None:
        self.live.console.print(text, style="dim", highlight=False)

    def row(self, row: Row) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.live.stop()


class PlainView:
    """One line per event, for logs. That its output may be closed is the concern of leeway_host.terminal."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._last = ""

    def status(self, text: str) -> None:
        if text != self._last:
            self._last = text
            print(text, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def row(self, row: Row) -> None:
        cells = (f"{column.title} {cell(row, metric, column.form)}" for metric, column in columns())
        text = f"step {row['step'] + 1}/{self.steps}  " + "  ".join(cells)
        print(f"{text}  {verdict_text(row)}", flush=True)

    def close(self) -> None:
        return


class JsonView(PlainView):
    """Each step as one JSON object on standard output."""

    def row(self, row: Row) -> None:
        print(json.dumps(row), flush=True)


def open_view(steps: int, as_json: bool) -> View:
    """The view that suits the output: JSON lines, a table on a terminal, or plain lines."""
    if as_json:
        return JsonView(steps)
    console = Console()
    return LiveView(console, steps) if console.is_terminal else PlainView(steps)
