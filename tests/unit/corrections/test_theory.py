"""What the formulas promise beyond one gradient: bias, excess update norm, KL estimators, filtered data.

Explicit softmax policies at one prefix, float64; numbered after section 12 of the specification of formulas.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from correction_support import Prefix, V
from torch import Tensor

from leeway.corrections import ess, kl_rao_blackwell, predict_crossing, predict_ess
from leeway.corrections.lag import k3


def rows(p: Prefix) -> Tensor:
    """[V, V] scores: row v is grad log pi_theta(v)."""
    return torch.stack([p.score(v) for v in range(V)]).detach()


def mean_estimate(p: Prefix, law: Tensor, q: Tensor, method: str, **config: object) -> Tensor:
    """E over a ~ law of the method's ascent direction with advantage q(a)."""
    parts = [law[a] * p.gradient(method, p.batch(a, float(q[a])), **config) for a in range(V)]
    return torch.stack(parts).sum(0)


# -- 8: first-order bias of the numerical discrepancy -----------------------------------------------------


def bias_and_forecast(scale: float, centering: str) -> tuple[Tensor, Tensor]:
    """Bias of the estimator against E_{pi_theta}[Q s], and its first-order formula."""
    p = Prefix(3, lag=0.4, discrepancy=0.0)
    g = torch.Generator().manual_seed(5)
    p.log_mu = torch.log_softmax(p.log_s + scale * torch.randn(V, generator=g, dtype=torch.float64), 0)
    q = torch.randn(V, generator=g, dtype=torch.float64) + 1.5
    pi, s, mu = p.log_pi.exp().detach(), p.log_s.exp(), p.log_mu.exp()
    w, delta = pi / s, p.log_s - p.log_mu
    target = (pi * q) @ rows(p)
    got = mean_estimate(p, mu, q, "dlc", centering=centering, lag_clip="none") - target
    value = q if centering == "none" else q - (s * q).sum()
    return got, -(s * delta * value * w) @ rows(p)


@pytest.mark.parametrize("centering", ["none", "weighted", "discrepancy"])
def test_bias_is_the_first_order_formula_up_to_second_order(centering: str) -> None:
    """Uncentred: -E_{pi_s}[delta Q w s]; centred: the same with Q less the prefix's value."""
    errors = []
    for scale in (2e-2, 1e-2, 5e-3):
        bias, forecast = bias_and_forecast(scale, centering)
        assert float((bias - forecast).norm()) < 0.1 * float(forecast.norm())
        errors.append(float((bias - forecast).norm()))
    for larger, smaller in itertools.pairwise(errors):
        assert larger / smaller == pytest.approx(4, rel=0.1)


def test_centring_removes_the_part_that_goes_with_the_value() -> None:
    uncentred, centred = (float(bias_and_forecast(1e-2, c)[0].norm()) for c in ("none", "weighted"))
    assert centred < 0.7 * uncentred


# -- 9: score centring against importance sampling under pure lag ------------------------------------------


def excess(x: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """g_SC, g_IS, D's exact formula and C u, for logits moved by x u from the sampler's."""
    p = Prefix(7, lag=0.0, discrepancy=0.0)
    g = torch.Generator().manual_seed(9)
    u = torch.randn(V, generator=g, dtype=torch.float64)
    q = torch.randn(V, generator=g, dtype=torch.float64)
    start = p.logits.detach().clone()
    with torch.no_grad():
        p.logits += x * u
    p.log_pi = torch.log_softmax(p.logits, 0)
    p.log_s = p.log_mu = torch.log_softmax(start, 0)
    pi, s = p.log_pi.exp().detach(), p.log_s.exp()
    g_sc = mean_estimate(p, s, q, "score_centering")
    g_is = mean_estimate(p, s, q, "is")
    centred = q - (s * q).sum()
    formula = -(s * (pi / s - 1) * centred) @ rows(p)
    at_start = torch.eye(V, dtype=torch.float64) - s  # scores at the sampler's weights
    c_u = (s * centred * (at_start @ u)) @ at_start
    return g_sc, g_is, formula, c_u


def test_excess_update_is_the_formula_and_quadratic_in_the_step() -> None:
    g_sc, g_is, formula, _ = excess(0.3)
    assert float((g_sc - g_is - formula).norm()) < 1e-14
    ratios = []
    for x in (1e-2, 1e-3, 1e-4):
        g_sc, g_is, formula, c_u = excess(x)
        assert float((g_sc - g_is - formula).norm()) < 1e-14
        ratios.append(float(((g_sc - g_is) / x).norm() ** 2 / c_u.norm() ** 2))
    assert [abs(r - 1) for r in ratios] == sorted((abs(r - 1) for r in ratios), reverse=True)
    assert ratios[-1] == pytest.approx(1, abs=1e-3)


# -- 11: KL estimators, filtered data ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_rao_blackwell_is_the_mean_of_the_sampled_estimators(seed: int) -> None:
    p = Prefix(seed, lag=0.3)
    logp, logq = p.log_s, p.log_mu
    exact = kl_rao_blackwell(logp[None], logq[None])
    assert exact.shape == (1,) and float(exact) > 0
    weights = logp.exp()
    for estimator in (logp - logq, k3(logq - logp)):
        assert float((weights * estimator).sum()) == pytest.approx(float(exact), abs=1e-14)
        assert float((weights * (estimator - exact) ** 2).sum()) > 1e-4  # Rao-Blackwell: 0 within a prefix
    assert float(kl_rao_blackwell(logp, logp)) == 0


def test_rao_blackwell_skips_what_p_cannot_draw() -> None:
    logp = torch.tensor([0.0, -math.inf], dtype=torch.float64)
    logq = torch.log(torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert float(kl_rao_blackwell(logp, logq)) == pytest.approx(math.log(2))


def test_filtered_data_follow_the_tilted_law_and_centring_drifts_again() -> None:
    """mu'(a) = mu(a) P(keep | a) / P(keep): with it E[A (s - E_mu s)] is no longer 0 for a constant A."""
    p = Prefix(11)
    g = torch.Generator().manual_seed(13)
    mu = p.log_mu.exp()
    keep = torch.rand(V, generator=g, dtype=torch.float64)  # the rest of the response decides
    drawn = torch.multinomial(mu, 400_000, replacement=True, generator=g)
    kept = drawn[torch.rand(len(drawn), generator=g, dtype=torch.float64) < keep[drawn]]
    observed = torch.bincount(kept, minlength=V).double() / len(kept)
    tilted = mu * keep / (mu * keep).sum()
    assert float((observed - tilted).abs().max()) < 5e-3
    assert float((tilted - mu).abs().max()) > 5e-2
    ones = torch.ones(V, dtype=torch.float64)
    assert float(mean_estimate(p, mu, ones, "score_centering").norm()) < 1e-12
    drift = mean_estimate(p, observed, ones, "score_centering")
    assert float((drift - (tilted - mu) @ rows(p)).norm()) < 1e-2
    assert float(drift.norm()) > 5e-2


# -- 7: forecasts --------------------------------------------------------------------------------------------


def test_crossing_of_a_gaussian_log_ratio() -> None:
    """Var = (age / 14)^2 ln 2: forecast 14 from any age, and the measured ESS crosses 0.5 there."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(200_000, generator=g, dtype=torch.float64)
    for age in (2, 7, 11, 14):
        sd = age / 14 * math.sqrt(math.log(2))
        x = sd * z - sd**2 / 2
        assert predict_crossing(float(x.var()), age) == pytest.approx(14, rel=0.01)
    measured = ess(x, torch.ones(len(x), dtype=torch.bool), torch.arange(len(x)))
    assert measured == pytest.approx(0.5, abs=0.01)
    assert predict_ess(x) == pytest.approx(0.5, abs=0.01)
    assert predict_crossing(0.0, 3) == predict_crossing(0.5, 0) == math.inf
    assert predict_crossing(0.1, 5, 0.9) == pytest.approx(5 * math.sqrt(math.log(1 / 0.9) / 0.1))
