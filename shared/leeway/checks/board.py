"""Board: the latest and the worst result of every measure, in Redis and in a run's directory.

A fail is permanent: good data does not repair what was trained on bad data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import redis
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from leeway.checks.result import CheckResult, judge, worse
from leeway.errors import UsageError
from leeway.events import write_event
from leeway.streams import Keys, now, retrying

FILE_NAME = "checks.json"


class CheckRecord(BaseModel):
    """Results of one measure of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    latest: CheckResult
    worst: CheckResult
    at: float
    """Unix time of `latest`, seconds."""


Records = dict[str, CheckRecord]
_ADAPTER = TypeAdapter(Records)


def merge(records: Records, results: Iterable[CheckResult], at: float) -> list[CheckResult]:
    """Merge results into `records`; returns those worse than all earlier results of their measure."""
    news = []
    for result in results:
        known = records.get(result.name)
        worst = result if known is None or not worse(known.worst, result) else known.worst
        if result.status != "ok" and (known is None or worse(result, known.worst)):
            news.append(result)
        records[result.name] = CheckRecord(latest=result, worst=worst, at=at)
    return news


def merge_record(records: Records, record: CheckRecord) -> None:
    """Merge a record into `records`: of both, the worse `worst` and the later `latest`."""
    name, known = record.worst.name, records.get(record.worst.name)
    if known is not None:
        worst = record.worst if worse(record.worst, known.worst) else known.worst
        later = record if record.at >= known.at else known
        record = CheckRecord(latest=later.latest, worst=worst, at=later.at)
    records[name] = record


def load_records(client: redis.Redis, keys: Keys, *, budget_s: float) -> Records:
    """Read the hash `checks` of a run; each writer uses its own fields, `source:name`."""
    raw = retrying(lambda: client.hgetall(keys.checks), budget_s=budget_s, what="reading the checks")
    records: Records = {}
    for value in cast(Mapping[bytes, bytes], raw).values():
        merge_record(records, CheckRecord.model_validate_json(value))
    return records


def post(
    client: redis.Redis,
    keys: Keys,
    records: Records,
    results: Iterable[CheckResult],
    *,
    source: str,
    budget_s: float,
) -> list[CheckResult]:
    """Merge results into `records` and the hash `checks`, and publish an event for each that got worse."""
    results = list(results)
    if not results:
        return []
    news = merge(records, results, now())
    fields: dict[Any, str] = {f"{source}:{r.name}": records[r.name].model_dump_json() for r in results}
    retrying(lambda: client.hset(keys.checks, mapping=fields), budget_s=budget_s, what="writing the checks")
    for result in news:
        write_event(
            client,
            keys,
            level="error" if result.status == "fail" else "warning",
            source=source,
            name="check",
            text=f"check {result.name}: {result.status}: {result.evidence}",
            data=result.model_dump(mode="json"),
            budget_s=budget_s,
        )
    return news


def post_rejected(client: redis.Redis, keys: Keys, text: str, *, source: str, budget_s: float) -> None:
    """Fail `numerics/non_finite`, from a process that is about to exit because of it."""
    result = judge("numerics/non_finite", 1.0, f"rejected: {text}", fail=0.0)
    records = load_records(client, keys, budget_s=budget_s)
    post(client, keys, records, [result], source=source, budget_s=budget_s)


def dump_records(records: Records) -> str:
    """The text of checks.json."""
    return _ADAPTER.dump_json(records, indent=1).decode() + "\n"


def read_records(path: Path) -> Records:
    """Read a checks.json; empty if it does not exist. Raises UsageError if it cannot be read."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as exc:
        raise UsageError(f"{path} cannot be read as check results: {exc}") from exc
