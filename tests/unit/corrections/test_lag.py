"""ESS, its prediction, lag metrics and advantages."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.config import build_correction
from leeway.corrections import advantages, ess, lag_metrics, predict_ess
from leeway.corrections.lag import Level, k3, tail_factor, variance


def share(log_ratio: list[float], seq: list[int] | None = None, level: str = "token") -> float:
    x = torch.tensor(log_ratio, dtype=torch.float64)
    ids = torch.arange(len(x)) if seq is None else torch.tensor(seq)
    return ess(x, torch.ones(len(x), dtype=torch.bool), ids, level)  # type: ignore[arg-type]


def test_worked_values() -> None:
    assert share([0.3] * 5) == pytest.approx(1)
    assert share([0, 0, 0, math.log(9)]) == pytest.approx(3 / 7)
    assert share([50.0, -50.0, -50.0, -50.0]) == pytest.approx(1 / 4)
    assert share([]) == 1.0


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=40), st.floats(-50, 50))
@settings(deadline=None)
def test_bounds_and_scale_invariance(values: list[float], shift: float) -> None:
    got = share(values)
    assert 1 / len(values) - 1e-12 <= got <= 1
    assert share([v + shift for v in values]) == pytest.approx(got, rel=1e-6)


def test_levels_pool_over_responses() -> None:
    log_ratio, seq = [0.5, -0.5, 1.0, 1.0], [0, 0, 1, 1]
    assert share(log_ratio, seq, "sequence") == pytest.approx(share([0.0, 2.0]))
    assert share(log_ratio, seq, "geometric") == pytest.approx(share([0.0, 1.0]))
    x = torch.tensor([0.0, math.nan, 0.0])
    assert ess(x, torch.tensor([True, False, True]), torch.tensor([0, 0, 1]), "sequence") == 1


def test_gaussian_and_skewed_ratios() -> None:
    g = torch.Generator().manual_seed(0)
    s2 = math.log(2)
    x = torch.randn(400_000, generator=g, dtype=torch.float64) * s2**0.5 - s2 / 2
    got = ess(x, torch.ones(len(x), dtype=torch.bool), torch.arange(len(x)))
    assert got == pytest.approx(0.5, abs=0.01)
    assert predict_ess(x) == pytest.approx(0.5, abs=0.01)
    assert tail_factor(got, variance(x)) == pytest.approx(1, abs=0.03)
    # Gamma(k=4, theta=.15): exact .881, Gaussian .914, third cumulant .890.
    gamma = torch.distributions.Gamma(torch.tensor(4.0, dtype=torch.float64), 1 / 0.15)
    torch.manual_seed(0)
    y = gamma.sample((400_000,))
    exact = (1 - 0.15) ** -8 / (1 - 0.3) ** -4
    assert exact == pytest.approx(0.881, abs=1e-3)
    skewed = ess(y, torch.ones(len(y), dtype=torch.bool), torch.arange(len(y)))
    assert skewed == pytest.approx(exact, abs=0.01)
    assert skewed < predict_ess(y) and tail_factor(skewed, variance(y)) > 1.1


def test_raw_ratios_not_clamped_at_two() -> None:
    """Clamping at 2 would read 0.69 or more where the pooled value is near 0.43."""
    assert share([0, 0, 0, math.log(9)]) < share([0, 0, 0, math.log(2)])


def metrics(**change: torch.Tensor) -> dict[str, float]:
    base = {
        "logp": torch.tensor([-1.0, -2.0, -0.5]),
        "logp_sync": torch.tensor([-1.0, -2.5, -0.5]),
        "logp_mu": torch.tensor([-1.1, -2.4, -0.5]),
        "mask": torch.tensor([True, True, True]),
        "seq_ids": torch.tensor([0, 0, 1]),
        "advantages": torch.tensor([1.0, 1.0, -1.0]),
    }
    return lag_metrics(**{**base, **change}, config=build_correction())  # type: ignore[arg-type]


def test_lag_metrics_by_hand() -> None:
    got = metrics()
    assert got["lag/clip_fraction"] == pytest.approx(1 / 3)  # exp(.5) > 1.2 with A > 0
    assert got["disc/abs_mean"] == pytest.approx(0.2 / 3, abs=1e-6)
    assert got["lag/var"] == pytest.approx(0.5**2 * (1 / 3) * (2 / 3), abs=1e-6)
    assert got["lag/predicted_ess_tok"] == pytest.approx(math.exp(-got["lag/var"]))


def test_lag_metrics_refuse_what_is_not_finite() -> None:
    with pytest.raises(ValueError, match="1 of 3 discrepancy log-ratios"):
        metrics(logp_mu=torch.tensor([-1.0, math.nan, -0.5]))
    assert metrics(logp_mu=torch.tensor([-1.0, math.nan, -0.5]), mask=torch.tensor([True, False, True]))


def test_k3_estimates_kl_from_above_zero() -> None:
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q = torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)
    kl = float((p * (p / q).log()).sum())
    assert float((p * k3((q / p).log())).sum()) == pytest.approx(kl, abs=1e-12)
    assert (k3((q / p).log()) >= 0).all()


@given(st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=1, max_size=5))
@settings(deadline=None)
def test_advantages_centre_each_group(groups: list[list[float]]) -> None:
    rewards = torch.tensor(groups, dtype=torch.float64)
    for kind in ("grpo", "dr_grpo", "rloo"):
        got = advantages(rewards, kind)
        assert torch.isfinite(got).all() and got.abs().max() < 50
        assert got.sum(1).abs().max() < 1e-6


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1 + 1e-9]], dtype=torch.float64)
    assert advantages(rewards, "dr_grpo")[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert advantages(rewards, "rloo")[0, 0] == pytest.approx(1 - 1 / 3)
    grpo = advantages(rewards, "grpo")
    assert grpo[0, 0] == pytest.approx(0.5 / (0.5 * (4 / 3) ** 0.5), rel=1e-5)
    assert grpo[1].tolist() == [0.0] * 4  # float residue is not a difference
    assert advantages(torch.ones(3, 1), "grpo").tolist() == [[0.0]] * 3
    with pytest.raises(ValueError, match="at least two"):
        advantages(torch.ones(3, 1), "rloo")
    with pytest.raises(ValueError, match="finite"):
        advantages(torch.tensor([[1.0, math.inf]]))


def test_advantages_of_whole_numbers_are_not_cut_to_whole_numbers() -> None:
    got = advantages(torch.tensor([[0, 0, 0, 1]]), "dr_grpo")
    assert got.dtype == torch.float32
    assert got.tolist() == [[-0.25, -0.25, -0.25, 0.75]]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_ess_of_what_is_not_finite(bad: float, level: Level) -> None:
    """min(1, nan) would be 1: a perfect score for broken numbers."""
    with pytest.raises(ValueError, match="1 of 2 log-ratios"):
        ess(torch.tensor([0.0, bad]), torch.tensor([True, True]), torch.tensor([0, 1]), level)


def test_lag_metrics_stay_finite() -> None:
    got = metrics(logp_sync=torch.tensor([-900.0, -2.5, -0.5]))
    assert all(math.isfinite(value) for value in got.values())
