"""`leeway doctor`: all checks of a run, from its output directory or from the Redis server of a live run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import redis
from rich.table import Table
from rich.text import Text

from leeway.checks.board import FILE_NAME, CheckRecord, Records, load_records, merge, read_records
from leeway.checks.catalogue import CATALOGUE
from leeway.checks.monitor import replay
from leeway.checks.result import ORDER, CheckResult, judge
from leeway.config.load import load_config
from leeway.errors import UsageError
from leeway.messages import ReportHeader
from leeway.metrics.areas.resync import WEIGHTS_VERSION
from leeway.metrics.areas.tokens import TOKENS
from leeway.statuses import read_statuses
from leeway.streams import Keys, RedisUnavailable, connect, now
from leeway_host.launch.record import read_rows

PROBE_WAIT_S = 60.0
BUDGET_S = 10.0
QUIET_S = 60.0
"""Maximum age of the newest result of a live run; a controller posts results every second."""
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "-": "dim"}


@dataclass(frozen=True)
class Diagnosis:
    """The results of all checks; `notes` name what could not be checked."""

    run: str
    records: Records
    notes: list[str]

    @property
    def failed(self) -> list[CheckResult]:
        return [r.worst for r in self.records.values() if r.worst.status == "fail"]

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON values, for --json."""
        return {
            "run": self.run,
            "status": "fail" if self.failed else self._mildest(),
            "checks": {name: record.model_dump(mode="json") for name, record in self.records.items()},
            "not_measured": [name for name in CATALOGUE if name not in self.records],
            "notes": self.notes,
        }

    def _mildest(self) -> str:
        return max((r.worst.status for r in self.records.values()), key=lambda s: ORDER[s], default="ok")


def diagnose(target: str, name: str | None = None) -> Diagnosis:
    """Check the run in a directory, or a live run on a Redis server (redis://...).

    Raises UsageError if there is no such run.
    """
    if target.startswith(("redis://", "rediss://")):
        return diagnose_live(target, name)
    return diagnose_directory(Path(target))


def diagnose_directory(directory: Path) -> Diagnosis:
    """The controller's results during the run, and the step checks repeated on metrics.jsonl."""
    rows = read_rows(directory / "metrics.jsonl") if directory.is_dir() else []
    records = read_records(directory / FILE_NAME) if directory.is_dir() else {}
    if not rows and not records:
        raise UsageError(
            f"{directory} contains neither metrics.jsonl nor {FILE_NAME}: expected a run's output directory, "
            "or redis://... of a live run"
        )
    notes = []
    if not records:
        notes.append(
            f"{FILE_NAME} is missing (checks.enabled was false, or the run ended immediately): only "
            "metrics.jsonl is checked"
        )
    config_path = directory / "config.yaml"
    if config_path.exists():
        config = load_config(config_path, environ={})
        at = float(rows[-1].get("time", 0.0)) if rows else 0.0
        again = replay(config, [report_of(row) for row in rows])
        # Only the controller could compare batches with their rollouts; its results take precedence.
        merge(records, [r for r in again if r.name not in records or r.status != "ok"], at)
    return Diagnosis(str(directory), _sorted(records), notes)


def report_of(row: dict[str, Any]) -> ReportHeader:
    """The step report that a row of metrics.jsonl was written from."""
    metrics = {k: v for k, v in row.items() if isinstance(v, (int, float, str)) and "/" in k}
    metrics[TOKENS] = row.get(TOKENS, 0.0)
    return ReportHeader.model_validate(
        {
            "event": "step",
            "epoch": row.get("epoch", 0),
            "step": row["step"],
            "version": row.get(WEIGHTS_VERSION, 0),
            "metrics": metrics,
        }
    )


def diagnose_live(url: str, name: str | None) -> Diagnosis:
    """Request a probe of every sampler, then read the controller's results."""
    try:
        client = connect(url)
    except RedisUnavailable as exc:
        raise UsageError(str(exc)) from exc
    try:
        keys = Keys(name) if name else Keys(find_run(client))
        if not client.exists(keys.state):
            raise UsageError(f"no run {keys.run!r} on this server (there is no key {keys.state})")
        notes = probe_samplers(client, keys)
        records = load_records(client, keys, budget_s=BUDGET_S)
        merge(records, [check_controller(records)], now())
        return Diagnosis(keys.run, _sorted(records), notes)
    finally:
        client.close()


def find_run(client: redis.Redis) -> str:
    """The name of the only run on a server. Raises UsageError if there is none or more than one."""
    found = sorted(
        cast(bytes, key).decode().split("{", 1)[1].split("}:", 1)[0]
        for key in client.scan_iter(match="leeway:{*}:state", count=1000)
    )
    if len(found) != 1:
        there = f"the runs {', '.join(found)}: select one with --name" if found else "no run"
        raise UsageError(f"this server has {there}")
    return found[0]


def probe_samplers(client: redis.Redis, keys: Keys, wait_s: float = PROBE_WAIT_S) -> list[str]:
    """Request a probe of every live sampler and wait for the results; returns notes about missing ones."""
    request = int(client.incr(keys.probe))
    deadline = time.monotonic() + wait_s
    while True:
        statuses = read_statuses(client, keys, budget_s=BUDGET_S)
        silent = [s.sampler for s in statuses if s.probe is None or s.probe.request < request]
        if statuses and not silent:
            time.sleep(2.0)  # the controller evaluates heartbeats once a second
            return []
        if time.monotonic() > deadline:
            who = ", ".join(silent) or "no sampler"
            return [
                f"no probe within {wait_s:g} s from: {who} (checks.probe_draws 0, no ticket yet, or busy)"
            ]
        time.sleep(0.2)


def check_controller(records: Records) -> CheckResult:
    """`controller/alive`: whether a controller evaluates the checks of a live run."""
    age = now() - max((record.at for record in records.values()), default=0.0)
    text = (
        f"the newest result is {age:.0f} s old" if records else "the controller has not posted a result yet"
    )
    return judge("controller/alive", age, text, fail=QUIET_S)


def _sorted(records: Records) -> Records:
    order = {name: i for i, name in enumerate(CATALOGUE)}
    return dict(sorted(records.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def build_table(diagnosis: Diagnosis) -> Table:
    """A table of all checks, including those that were not measured."""
    table = Table("check", "status", "value", "limit", "evidence", title=f"Leeway checks of {diagnosis.run}")
    for name in [*CATALOGUE, *(n for n in diagnosis.records if n not in CATALOGUE)]:
        record = diagnosis.records.get(name)
        if record is None:
            what = CATALOGUE[name][0]
            table.add_row(name, Text("-", STYLES["-"]), "", "", Text(f"not measured: {what}", "dim"))
            continue
        worst = record.worst
        table.add_row(
            name,
            Text(worst.status, STYLES[worst.status]),
            _number(worst.value),
            _number(worst.threshold),
            _evidence(record),
        )
    return table


def _evidence(record: CheckRecord) -> Text:
    worst, text = record.worst, Text(record.worst.evidence)
    where = [f"step {worst.step + 1}"] if worst.step is not None else []
    where += [f"version {worst.version}"] if worst.version is not None else []
    if where:
        text.append(f" [{', '.join(where)}]", "dim")
    if worst.status != "ok":
        if record.latest.status == "ok":
            text.append(" (ok since)", "dim")
        if worst.name in CATALOGUE:
            text.append(f"\n→ {CATALOGUE[worst.name][1]}", "yellow")
    return text


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
