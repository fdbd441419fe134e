"""What the doctor shows: every measure, also those that nothing is known about."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from leeway.checks import CATALOGUE
from leeway.checks.board import Records, merge
from leeway.checks.result import judge
from leeway.errors import UsageError
from leeway_host.cli.app import app
from leeway_host.doctor import Diagnosis, build_table


def shown(records: Records) -> str:
    console = Console(file=io.StringIO(), width=240)
    console.print(build_table(Diagnosis("run", records, [])))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_all_measures_are_listed_and_a_fail_says_what_to_do() -> None:
    records: Records = {}
    name = "numerics/log_ratio"
    merge(records, [judge(name, 25.0, "largest |log-ratio| 25", fail=20.0, step=3, version=1)], 1.0)
    merge(records, [judge(name, 1.0, "largest |log-ratio| 1", fail=20.0, step=4, version=1)], 2.0)
    text = shown(records)
    assert all(name in text for name in CATALOGUE)
    assert text.count("not measured") == len(CATALOGUE) - 1
    for part in ("fail", "25", "20", "step 4, version 1", "ok since", CATALOGUE[name][1]):
        assert part in text
    assert Diagnosis("run", records, []).as_dict()["status"] == "fail"


def test_a_number_that_is_none_fails() -> None:
    assert judge("a/b", float("nan"), "", fail=1.0, warn=0.5).status == "fail"
    assert judge("a/b", 0.7, "", fail=1.0, warn=0.5).status == "warn"
    assert judge("a/b", 5.0, "", fail=None).status == "ok"


def test_merge_reports_only_what_got_worse() -> None:
    records: Records = {}
    values = [0.0, 2.0, 2.0, 9.0, 0.0, 9.0]
    news = [merge(records, [judge("a/b", v, "", fail=5.0, warn=1.0)], 0.0) for v in values]
    assert [[n.status for n in found] for found in news] == [[], ["warn"], [], ["fail"], [], []]


@pytest.mark.parametrize("suffix", ["", ".yaml"])
def test_a_name_that_is_too_long(suffix: str) -> None:
    done = CliRunner().invoke(app, ["doctor", "x" * 300 + suffix])
    assert isinstance(done.exception, UsageError) and "File name too long" in str(done.exception)
