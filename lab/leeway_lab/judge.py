"""Computes the verdicts of experiments whose runs are complete, in processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import as_completed
from pathlib import Path

from leeway_lab.analyses import ANALYSES
from leeway_lab.report import write_verdict
from leeway_lab.results import Results, Verdict
from leeway_lab.spec import Experiment
from leeway_lab.store import worker_pool

SEQUENCES = 256
"""New responses per KL estimate; the error that remains is smaller than the spread of the runs."""


def judge(out: Path, experiment: Experiment, seeds: int | None) -> tuple[str, Verdict]:
    """The experiment's name and its verdict, which is stored in out/verdicts."""
    verdict = ANALYSES[experiment.analysis](Results(out, experiment, seeds, SEQUENCES))
    write_verdict(out, experiment, verdict, seeds or experiment.seeds)
    return experiment.name, verdict


def judge_all(
    out: Path, chosen: list[Experiment], seeds: int | None, jobs: int
) -> Iterator[tuple[str, Verdict]]:
    """Yields each verdict as soon as it is ready."""
    pool = worker_pool(jobs)
    try:
        for future in as_completed([pool.submit(judge, out, experiment, seeds) for experiment in chosen]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
