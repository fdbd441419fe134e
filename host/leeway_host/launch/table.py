"""The live view of a run: one table on a terminal, one line a step elsewhere, JSON lines with --json."""

from __future__ import annotations

import io
import json
import sys
from collections import deque
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]
COLUMNS = (
    ("step", "step", "d"),
    ("reward", "reward/mean", ".3f"),
    ("ESS tok", "lag/ess_tok", ".3f"),
    ("ESS seq", "lag/ess_seq", ".3f"),
    ("age", "lag/age", "d"),
    ("version", "weights/version", "d"),
    ("sampler tok/s", "sampler/tokens_per_s", ".0f"),
    ("trainer tok/s", "trainer/tokens_per_s", ".0f"),
)


class View(Protocol):
    """Where a run shows what it does."""

    def status(self, text: str) -> None:
        """What is going on right now."""

    def note(self, text: str) -> None:
        """Something worth keeping on screen: a restart, a lost sampler."""

    def row(self, row: Row) -> None:
        """A step was trained."""

    def close(self) -> None:
        """No more calls follow."""


def cell(row: Row, metric: str, form: str) -> str:
    """A number as text, `-` when it is not there."""
    value = row.get(metric)
    return format(int(value) if form == "d" else value, form) if isinstance(value, (int, float)) else "-"


def verdict_text(row: Row) -> str:
    """`continue`, or `resync (ess)`."""
    action = row.get("verdict/action") or "-"
    reason = row.get("sync/reason")
    return f"{action} ({reason})" if reason else str(action)


class LiveView:
    """A table that renews itself on a terminal."""

    def __init__(self, console: Console, steps: int, keep: int = 20) -> None:
        self.steps = steps
        self.rows: deque[Row] = deque(maxlen=keep)
        self.line = ""
        self.live = Live(console=console, refresh_per_second=4, get_renderable=self.render)
        self.live.start()

    def render(self) -> RenderableType:
        table = Table(title=f"{len(self.rows) and self.rows[-1]['step'] + 1} of {self.steps} steps")
        for title, _, _ in COLUMNS:
            table.add_column(title, justify="right")
        table.add_column("verdict")
        for shown in self.rows:
            row = {**shown, "step": shown["step"] + 1}
            style = "yellow" if row.get("verdict/action") == "resync" else None
            cells = [cell(row, metric, form) for _, metric, form in COLUMNS]
            table.add_row(*cells, verdict_text(row), style=style)
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
    """One line per event, for logs. A reader that goes away does not end the run."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._last = ""

    def _print(self, stream: str, text: str) -> None:
        try:
            print(text, file=getattr(sys, stream), flush=True)
        except OSError:  # a closed pipe, a terminal that is gone
            setattr(sys, stream, io.StringIO())

    def status(self, text: str) -> None:
        if text != self._last:
            self._last = text
            self._print("stderr", text)

    def note(self, text: str) -> None:
        self._print("stderr", text)

    def row(self, row: Row) -> None:
        cells = (f"{title} {cell(row, metric, form)}" for title, metric, form in COLUMNS[1:])
        text = f"step {row['step'] + 1}/{self.steps}  " + "  ".join(cells)
        self._print("stdout", f"{text}  {verdict_text(row)}")

    def close(self) -> None:
        return


class JsonView(PlainView):
    """Each step as one JSON object on standard output."""

    def row(self, row: Row) -> None:
        self._print("stdout", json.dumps(row))


def open_view(steps: int, as_json: bool) -> View:
    """The view that fits where the output goes."""
    if as_json:
        return JsonView(steps)
    console = Console()
    return LiveView(console, steps) if console.is_terminal else PlainView(steps)
