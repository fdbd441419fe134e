"""Statistics for the checks, with numpy only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

MIN_EXPECTED = 8.0
"""Cells of a chi-square test with fewer expected draws are pooled."""


class RunningZ:
    """z of a sum of terms with mean 0: sum x / sqrt(sum x^2), over the last `window` batches of terms.

    Terms of drawn tokens are martingale differences, so z is standard normal whatever their dependence.
    """

    def __init__(self, window: int) -> None:
        self._parts: deque[tuple[float, float, int]] = deque(maxlen=window)

    def add(self, total: float, squares: float, count: int) -> None:
        """Add a batch of `count` terms: their sum, and the sum of their squares (or of their variances)."""
        self._parts.append((total, squares, count))

    @property
    def count(self) -> int:
        return sum(part[2] for part in self._parts)

    @property
    def mean(self) -> float:
        return sum(part[0] for part in self._parts) / max(self.count, 1)

    @property
    def z(self) -> float:
        spread = math.sqrt(sum(part[1] for part in self._parts))
        return sum(part[0] for part in self._parts) / spread if spread > 0 else 0.0


def chi_square(counts: Mapping[int, int], probabilities: Mapping[int, float]) -> tuple[float, int]:
    """(statistic, degrees of freedom) of drawn token counts against their probabilities.

    The remaining probability is one more cell, and rare cells are pooled. (0, 0) if fewer than two cells
    remain.
    """
    draws = sum(counts.values())
    rest = max(0.0, 1.0 - sum(probabilities.values()))
    elsewhere = draws - sum(counts.get(token, 0) for token in probabilities)
    rare_expected, rare_seen = rest * draws, float(elsewhere)
    cells: list[tuple[float, float]] = []
    for token, probability in probabilities.items():
        expected, seen = probability * draws, float(counts.get(token, 0))
        if expected >= MIN_EXPECTED:
            cells.append((expected, seen))
        else:
            rare_expected, rare_seen = rare_expected + expected, rare_seen + seen
    cells.sort()
    if cells and rare_expected < MIN_EXPECTED:
        cells[0] = (cells[0][0] + rare_expected, cells[0][1] + rare_seen)
    else:
        cells.append((rare_expected, rare_seen))
    if len(cells) < 2:
        return 0.0, 0
    return sum((seen - expected) ** 2 / expected for expected, seen in cells), len(cells) - 1


def chi_square_z(statistic: float, dof: int) -> float:
    """A chi-square statistic as a standard normal quantile (Wilson and Hilferty's cube root)."""
    if dof < 1:
        return 0.0
    spread = 2.0 / (9.0 * dof)
    return (math.pow(statistic / dof, 1 / 3) - (1 - spread)) / math.sqrt(spread)


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's r; 0 if x or y is constant."""
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.size < 2:
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else 0.0


def correlation_z(r: float, dof: float) -> float:
    """Fisher's z of a correlation over `dof` + 3 independent pairs; standard normal without correlation."""
    return math.atanh(max(-0.999999, min(0.999999, r))) * math.sqrt(max(dof, 0.0))


def repetition(ids: Sequence[int] | np.ndarray, n: int = 4) -> float | None:
    """Share of n-grams that occur earlier in the same response; None for fewer than 16 tokens."""
    tokens = np.asarray(ids)
    if tokens.size < 16:
        return None
    count = tokens.size - n + 1
    grams = np.zeros(count, dtype=np.uint64)
    for offset in range(n):  # a hash of each n-gram, modulo 2^64
        grams = grams * np.uint64(1_000_003) + tokens[offset : offset + count].astype(np.uint64)
    return 1.0 - len(np.unique(grams)) / count
