"""The statistics are what they say under the null, and see what they are for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from leeway.checks.stats import RunningZ, chi_square, chi_square_z, correlation, correlation_z, repetition


def test_chi_square_of_true_draws_is_standard_normal_as_z() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(12, 0.5))
    head = {i: float(p[i]) for i in range(8)}  # the rest is the tail
    z = []
    for _ in range(2000):
        tokens, counts = np.unique(rng.choice(12, size=192, p=p), return_counts=True)
        z.append(chi_square_z(*chi_square(dict(zip(tokens.tolist(), counts.tolist(), strict=True)), head)))
    assert abs(np.mean(z)) < 0.1
    assert 0.9 < np.std(z) < 1.1
    assert max(z) < 5


def test_chi_square_sees_another_temperature_and_says_nothing_about_one_cell() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 1.5, 20)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, logits / 0.6))
    tokens, counts = np.unique(rng.choice(20, size=2 * 512, p=q), return_counts=True)
    seen = dict(zip(tokens.tolist(), counts.tolist(), strict=True))
    assert chi_square_z(*chi_square(seen, dict(enumerate(p.tolist())))) > 7, "two probes are enough"
    assert chi_square({3: 192}, {3: 0.99999}) == (0.0, 0)


@pytest.mark.parametrize(
    ("statistic", "dof", "p"), [(18.307, 10, 0.05), (3.841, 1, 0.05), (76.154, 50, 0.01)]
)
def test_chi_square_z_matches_tables(statistic: float, dof: int, p: float) -> None:
    z = chi_square_z(statistic, dof)
    assert 0.5 * math.erfc(z / math.sqrt(2)) == pytest.approx(p, rel=0.06)


def test_running_z_forgets_and_weighs() -> None:
    z = RunningZ(window=2)
    z.add(100.0, 1.0, 10)
    z.add(2.0, 4.0, 1)
    z.add(-1.0, 1.0, 3)
    assert (z.count, z.mean) == (4, pytest.approx(0.25))
    assert z.z == pytest.approx(1.0 / math.sqrt(5.0))
    assert RunningZ(3).z == 0.0


def test_correlation() -> None:
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert correlation([1, 2, 3], [5, 5, 5]) == 0.0
    rng = np.random.default_rng(2)
    pairs = [(rng.normal(size=40), rng.normal(size=40)) for _ in range(2000)]
    z = [correlation_z(correlation(a, b), 37) for a, b in pairs]
    assert abs(np.mean(z)) < 0.1
    assert 0.9 < np.std(z) < 1.1


def test_repetition() -> None:
    assert repetition(list(range(30))) == 0.0
    assert repetition([7] * 30) == pytest.approx(1 - 1 / 27)
    assert repetition([1, 2, 3]) is None
    assert repetition([5, 6] * 20) == pytest.approx(1 - 2 / 37)
