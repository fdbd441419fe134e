"""Stores the results of runs by the key of their RunSpec, and runs missing ones in processes."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import torch

from leeway.errors import LeewayError
from leeway.process import die_with_parent
from leeway_lab.pipeline import run_pipeline
from leeway_lab.spec import RunSpec
from leeway_lab.train import RunResult, train

Ended = tuple[RunSpec, BaseException | None]
"""A run and the error it raised."""


class RunsFailed(LeewayError):
    """Some runs of the lab failed; the results of the others are stored."""


def path_of(out: Path, spec: RunSpec) -> Path:
    """Path of the result of `spec`."""
    return out / "runs" / f"{spec.key()}.pt"


def load(out: Path, spec: RunSpec) -> RunResult:
    """The stored result of `spec`."""
    data = torch.load(path_of(out, spec), weights_only=True)
    return RunResult(
        rows=data["rows"],
        resyncs=[(int(step), str(reason)) for step, reason in data["resyncs"]],
        weights=data["weights"],
    )


def worker_pool(jobs: int) -> ProcessPoolExecutor:
    """A pool of single-threaded processes that end with this one."""
    return ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_start_worker)


def _start_worker() -> None:
    die_with_parent()
    torch.set_num_threads(1)


def execute(out: Path, spec: RunSpec) -> str:
    """Run `spec` and store its result atomically."""
    if spec.engine == "pipeline":
        result = run_pipeline(spec, out / "pipeline" / spec.key())
    else:
        result = train(spec)
    path = path_of(out, spec)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    torch.save(asdict(result), temporary)
    temporary.replace(path)
    path.with_suffix(".json").write_text(json.dumps(spec.model_dump(mode="json"), indent=1) + "\n")
    return spec.key()


def execute_all(
    out: Path, specs: Iterable[RunSpec], jobs: int, done: Callable[[int, int], None] = lambda n, of: None
) -> int:
    """Run what is missing, `jobs` at a time and then those of the pipeline one by one; returns how
    many ran. `done(n, of)` after each.

    Raises RunsFailed at the end, with the first traceback, when one raised.
    """
    (out / "runs").mkdir(parents=True, exist_ok=True)
    todo = {spec.key(): spec for spec in specs}
    missing = [spec for spec in todo.values() if not path_of(out, spec).exists()]
    by_engine = {e: [spec for spec in missing if spec.engine == e] for e in ("lab", "pipeline")}
    ended = chain(_in_pool(out, by_engine["lab"], jobs), _one_by_one(out, by_engine["pipeline"]))
    failures: list[str] = []
    for number, (spec, error) in enumerate(ended, 1):
        if error is not None:
            text = "".join(traceback.format_exception(error))
            failures.append(f"{spec.model_dump_json()}\n{text}")
        done(number, len(missing))
    if failures:
        raise RunsFailed(f"{len(failures)} of {len(missing)} runs failed, first:\n{failures[0]}")
    return len(missing)


def _in_pool(out: Path, specs: list[RunSpec], jobs: int) -> Iterator[Ended]:
    if not specs:
        return
    pool = worker_pool(jobs)
    try:
        futures = {pool.submit(execute, out, spec): spec for spec in specs}
        for future in as_completed(futures):
            yield futures[future], future.exception()
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C, only what is running is waited for


def _one_by_one(out: Path, specs: list[RunSpec]) -> Iterator[Ended]:
    for spec in specs:
        try:
            execute(out, spec)
        except Exception as error:  # noqa: BLE001 (told at the end, as those of the pool are)
            yield spec, error
        else:
            yield spec, None
