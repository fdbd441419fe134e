"""What an analysis reads: the runs of each arm, and their divergence from on-policy in noise floors."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from leeway_lab.measure import Array, Divergence, Pairs, Ratio, deviations, floor_pairs, ratio_to_floor
from leeway_lab.model import Task, load_base
from leeway_lab.spec import ON_POLICY, Experiment, RunSpec
from leeway_lab.store import load
from leeway_lab.train import RunResult

Status = Literal["reproduced", "not reproduced", "inconclusive"]


@dataclass(frozen=True)
class Series:
    """A line of a figure; `low` and `high` bound a band."""

    label: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


@dataclass(frozen=True)
class Figure:
    """A figure of an experiment; `lines` are horizontal reference lines (label -> y)."""

    title: str
    x: str
    y: str
    series: list[Series]
    log_y: bool = False
    log_x: bool = False
    lines: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The outcome of an experiment by the criterion in its file."""

    status: Status
    text: str
    numbers: dict[str, Any]
    figures: list[Figure]


class Results:
    """The stored runs of an experiment."""

    def __init__(self, out: Path, experiment: Experiment, seeds: int | None, sequences: int) -> None:
        self.experiment, self.sequences = experiment, sequences
        self.specs: dict[str, list[RunSpec]] = experiment.runs(seeds)
        self._out = out
        self._runs: dict[str, list[RunResult]] = {}
        self._floors: dict[int, Pairs] = {}

    def runs(self, arm: str) -> list[RunResult]:
        """The arm's runs, one per seed."""
        if arm not in self._runs:
            self._runs[arm] = [load(self._out, spec) for spec in self.specs[arm]]
        return self._runs[arm]

    def column(self, arm: str, name: str) -> Array:
        """[seeds, steps] of a metric, for the steps that have it."""
        return np.array([[row[name] for row in run.rows if name in row] for run in self.runs(arm)])

    def marks(self, arm: str) -> list[int]:
        """Steps whose weights are stored."""
        return sorted(self.runs(arm)[0].weights)

    @cached_property
    def divergence(self) -> Divergence:
        """KL between weights of this experiment's model."""
        model = self.specs[next(iter(self.specs))][0].model
        base, tokenizer = load_base(model)
        return Divergence(base, Task(model, tokenizer), self.sequences)

    def floor(self, mark: int) -> Pairs:
        """KL between the on-policy runs after `mark` steps."""
        if mark not in self._floors:
            weights = [run.weights[mark] for run in self.runs(ON_POLICY)]
            self._floors[mark] = floor_pairs(self.divergence, weights)
        return self._floors[mark]

    def ratio(self, arm: str, mark: int, reverse: bool = False) -> Ratio:
        """KL(arm || on-policy) / floor after `mark` steps; `reverse`: KL(on-policy || arm)."""
        method = [run.weights[mark] for run in self.runs(arm)]
        on = [run.weights[mark] for run in self.runs(ON_POLICY)]
        dev = deviations(self.divergence, method, on, reverse)
        return ratio_to_floor(dev, self.floor(mark), reverse)

    def ratios(self, arm: str) -> dict[int, Ratio]:
        """The ratio at every mark."""
        return {mark: self.ratio(arm, mark) for mark in self.marks(arm)}

    def reverse(self, arm: str) -> Ratio:
        """KL(on-policy || arm) / floor at the last mark."""
        return self.ratio(arm, self.marks(arm)[-1], reverse=True)

    def syncs(self, arm: str) -> float:
        """Mean number of resyncs per run."""
        return float(np.mean([len(run.resyncs) for run in self.runs(arm)]))

    def first_below(self, arm: str, name: str, threshold: float) -> float | None:
        """Median over seeds of the first step (from 1) at which a metric is below `threshold`."""
        firsts = [
            next((i + 1 for i, value in enumerate(row) if value < threshold), None)
            for row in self.column(arm, name)
        ]
        found = [f for f in firsts if f is not None]
        return float(np.median(found)) if 2 * len(found) > len(firsts) else None


def ratio_figure(ratios: dict[str, dict[int, Ratio]], title: str) -> Figure:
    """KL / floor over steps, with bootstrap bands and the line of two floors."""
    series = [
        Series(
            label,
            [float(mark) for mark in found],
            [r.value for r in found.values()],
            [r.low for r in found.values()],
            [r.high for r in found.values()],
        )
        for label, found in ratios.items()
    ]
    return Figure(
        title,
        "optimiser steps",
        "KL to on-policy / noise floor",
        series,
        log_y=True,
        lines={"two floors": 2.0},
    )


def mean_line(results: Results, arm: str, name: str, label: str | None = None) -> Series:
    """Mean of a metric over the seeds, with its range."""
    values = results.column(arm, name)
    steps = [float(i + 1) for i in range(values.shape[1])]
    return Series(
        label or arm, steps, values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist()
    )


def rounded(ratios: dict[int, Ratio]) -> dict[str, list[float]]:
    """mark -> [value, low, high], for the numbers of a verdict."""
    return {str(mark): bounds(ratio) for mark, ratio in ratios.items()}


def bounds(ratio: Ratio) -> list[float]:
    """[value, low, high], for the numbers of a verdict."""
    return [round(v, 3) for v in (ratio.value, ratio.low, ratio.high)]


def first_departure(ratios: dict[int, Ratio], floors: float) -> int | None:
    """First mark at which KL / floor is above `floors`, and its lower bound above one floor."""
    return next((m for m in sorted(ratios) if ratios[m].value > floors and ratios[m].low > 1), None)
