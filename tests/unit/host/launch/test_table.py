"""The live view: rows on a terminal, as lines and as JSON."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from leeway_host.launch.table import JsonView, LiveView, PlainView

ROW: dict[str, Any] = {
    "step": 2,
    "reward/mean": 0.25,
    "lag/ess_tok": 0.91234,
    "lag/age": 3.0,
    "weights/version": 4,
    "sampler/tokens_per_s": 321.7,
    "verdict/action": "resync",
    "sync/reason": "ess",
}
LINE = (
    "step 3/8  reward 0.250  ESS tok 0.912  ESS seq -  age 3  version 4  sampler tok/s 322  trainer tok/s -  "
    "resync (ess)\n"
)


def test_a_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView(8)
    view.row(ROW)
    view.status("waiting")
    view.status("waiting")
    assert capsys.readouterr() == (LINE, "waiting\n")


def test_a_json_object_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    JsonView(8).row(ROW)
    assert json.loads(capsys.readouterr().out) == ROW


def test_a_table_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=140)
    view = LiveView(console, 8)
    view.row(ROW)
    view.close()
    console.print(view.render())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3 of 8 steps" in text
    for part in ("step", "ESS tok", "trainer tok/s", "0.912", "322", "resync (ess)"):
        assert part in text
