"""Gradients of the surrogates against their closed forms, on explicit softmax policies in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from correction_support import Prefix, V, correction
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.config import CorrectionConfig
from leeway.corrections import METHODS, Denominators, TokenBatch, surrogate_loss, tail_weight
from leeway.corrections.clips import f_clamp, f_identity, f_ppo
from leeway.corrections.primitives import tail_kappa, tail_surrogate

pytestmark = pytest.mark.thorough

CLIPS = {
    "ppo": f_ppo(0.2, 0.2, 3.0),
    "clamp": f_clamp(0.0, 2.0),
    "none": f_identity(),
}


def closed_form(p: Prefix, a: int, advantage: float, clip: str, centering: str) -> torch.Tensor:
    with torch.no_grad():
        pi, s, mu = p.log_pi.exp(), p.log_s.exp(), p.log_mu.exp()
        w = CLIPS[clip](pi / s, torch.tensor(advantage, dtype=torch.float64))
        centre = {
            "discrepancy": lambda: p.mean_score((mu - s) * w),
            "weighted": lambda: p.mean_score(mu * w),
            "plain": lambda: w[a] * p.mean_score(mu),
            "none": lambda: torch.zeros(len(pi), dtype=torch.float64),
        }[centering]()
        return advantage * (w[a] * p.score(a) - centre)


def test_a_method_has_the_name_of_its_module() -> None:
    assert "dlc" in METHODS
    assert {name: method.name for name, method in METHODS.items()} == {name: name for name in METHODS}


@given(st.integers(0, 10**6), st.integers(0, V - 1), st.sampled_from([-2.0, -0.3, 0.0, 0.7, 1.5]))
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("centering", ["discrepancy", "weighted", "plain", "none"])
@settings(max_examples=25, deadline=None)
def test_dlc_gradient_is_the_estimator(
    clip: str, centering: str, seed: int, a: int, advantage: float
) -> None:
    p = Prefix(seed)
    got = p.gradient("dlc", p.batch(a, advantage), lag_clip=clip, centering=centering)
    want = closed_form(p, a, advantage, clip, centering)
    assert torch.linalg.norm(got - want) <= 1e-10 * max(1.0, float(torch.linalg.norm(want)))


@pytest.mark.parametrize("advantage", [-1.3, 0.8])
@pytest.mark.parametrize("clip", CLIPS)
def test_mean_under_mu(clip: str, advantage: float) -> None:
    """Constant advantage: weighted centring has mean 0, the default keeps A E_{pi_s}[wbar s]."""
    p = Prefix(7)
    mu, s, pi = p.log_mu.exp(), p.log_s.exp(), p.log_pi.exp().detach()
    mean = {
        c: sum(mu[a] * p.gradient("dlc", p.batch(a, advantage), lag_clip=clip, centering=c) for a in range(V))
        for c in ("weighted", "discrepancy")
    }
    assert torch.linalg.norm(mean["weighted"]) < 1e-12
    w = CLIPS[clip](pi / s, torch.tensor(advantage, dtype=torch.float64))
    want = advantage * p.mean_score(s * w)
    assert torch.linalg.norm(mean["discrepancy"] - want) < 1e-12
    if clip == "none":
        assert torch.linalg.norm(want) < 1e-12
    else:
        assert torch.linalg.norm(want) > 1e-4


def test_at_lag_zero_dlc_is_score_centring() -> None:
    p = Prefix(3, lag=0.0)
    for a in range(V):
        got = p.gradient("dlc", p.batch(a, 0.9))
        want = 0.9 * (p.score(a) - p.mean_score(p.log_mu.exp()))
        assert torch.linalg.norm(got - want.detach()) < 1e-12


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_without_discrepancy_dlc_is_ppo_and_unclipped_is(advantage: float) -> None:
    p = Prefix(5, lag=1.0, discrepancy=0.0)
    for a in range(V):
        got = p.gradient("dlc", p.batch(a, advantage))
        r = torch.exp(p.log_pi[a] - p.log_s[a])
        surrogate = torch.minimum(r * advantage, r.clamp(0.8, 1.2) * advantage)
        if advantage < 0:
            surrogate = torch.maximum(surrogate, torch.tensor(3.0 * advantage, dtype=torch.float64))
        (want,) = torch.autograd.grad(surrogate, p.logits, retain_graph=True)
        assert torch.linalg.norm(got - want) < 1e-12
        unclipped = p.gradient("dlc", p.batch(a, advantage), lag_clip="none")
        is_ = p.gradient("is", p.batch(a, advantage))
        assert torch.linalg.norm(unclipped - is_) < 1e-12


@pytest.mark.parametrize("centering", ["discrepancy", "weighted", "plain"])
def test_head_with_everything_is_the_full_form(centering: str) -> None:
    p = Prefix(11)
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([ids, torch.tensor([-1, -1])])
    repeated = torch.cat([ids, ids[:3]])
    for a in (0, 5):
        full = p.gradient("dlc", p.batch(a, -0.6), centering=centering)
        for head in (ids, padded, repeated):
            got = p.gradient("dlc", p.batch(a, -0.6, head), centering=centering)
            assert torch.linalg.norm(got - full) < 1e-5


@pytest.mark.parametrize("kept", [2, 4, 8])
def test_head_form_is_exact_when_the_tail_follows_pi_theta(kept: int) -> None:
    """The model of the tail, taken literally: mu and pi_s proportional to pi_theta off the head."""
    p = Prefix(13)
    ids = torch.arange(kept)
    pi = p.log_pi.exp().detach()
    for name in ("log_mu", "log_s"):
        q = getattr(p, name).exp()
        tail = pi[kept:] / pi[kept:].sum() * (1 - q[:kept].sum())
        setattr(p, name, torch.log(torch.cat([q[:kept], tail])))
    for centering in ("discrepancy", "weighted", "plain"):
        got = p.gradient("dlc", p.batch(1, 1.1, ids), centering=centering)
        want = closed_form(p, 1, 1.1, "ppo", centering)
        assert torch.linalg.norm(got - want) < 1e-12


def with_sync_tail(p: Prefix, batch: TokenBatch, config: CorrectionConfig) -> TokenBatch:
    """The batch of one token, with the tail of mu as a multiple of pi_s."""
    assert batch.head_ids is not None
    assert batch.head_mask is not None
    assert batch.head_logp_mu is not None
    assert batch.head_logp_sync is not None
    ref, f = tail_weight(config)
    kappa = tail_kappa(batch.head_ids, batch.head_mask, batch.head_logp_mu, batch.head_logp_sync)
    tail = tail_surrogate(
        p.log_pi[None], p.log_s[None], batch.head_ids, batch.head_mask, batch.advantages,
        kappa if ref == "mu" else torch.ones_like(kappa), f,
    )  # fmt: skip
    return replace(batch, tail_logp=tail)


COMPOSED = [
    *({"method": "dlc", "centering": c, "lag_clip": clip} for c in ("discrepancy", "weighted", "plain")
      for clip in CLIPS),
    {"method": "score_centering"},
    *({"method": m, "score_centering": True} for m in ("none", "is", "tis", "icepop", "ppo")),
    {"method": "ppo", "score_centering": True, "reference": "sync"},
]  # fmt: skip


@pytest.mark.parametrize("config", COMPOSED, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("kept", [2, 5, 11])
def test_sync_tail_is_exact_when_the_tail_follows_pi_s(kept: int, config: dict[str, object]) -> None:
    """mu a multiple of pi_s off the head: the head form has the gradient of the full vocabulary."""
    p = Prefix(29)
    s = p.log_s.exp()
    q = p.log_mu.exp()
    tail = s[kept:] / s[kept:].sum() * (1 - q[:kept].sum())
    p.log_mu = torch.log(torch.cat([q[:kept], tail]))
    ids = torch.cat([torch.arange(kept), torch.tensor([-1, 0])])  # padded, and an id twice
    settings_ = correction(**config)  # type: ignore[arg-type]
    for a, advantage in ((0, 1.1), (V - 1, -0.7)):  # one on the head, one off it
        batch = with_sync_tail(p, p.batch(a, advantage, ids), settings_)
        got = p.gradient(batch=batch, **config)  # type: ignore[arg-type]
        want = p.gradient(batch=p.batch(a, advantage), **config)  # type: ignore[arg-type]
        assert torch.linalg.norm(got - want) < 1e-12


def test_sync_tail_is_closer_than_a_tail_like_pi_theta() -> None:
    """Under lag mu is closer to pi_s than to pi_theta: the mean error of the centre is smaller."""
    config = correction("dlc", centering="weighted")
    errors = {"current": 0.0, "sync": 0.0}
    for seed in range(40):
        p = Prefix(seed, lag=0.4, discrepancy=0.05, size=40)
        head = torch.argsort(p.log_mu, descending=True)[:6]
        exact = p.gradient("dlc", p.batch(3, 1.0), centering="weighted")
        for name, batch in (
            ("current", p.batch(3, 1.0, head)),
            ("sync", with_sync_tail(p, p.batch(3, 1.0, head), config)),
        ):
            got = p.gradient("dlc", batch, centering="weighted")
            errors[name] += float(torch.linalg.norm(got - exact))
    assert errors["sync"] < 0.6 * errors["current"]


def test_error_of_the_head_shrinks_with_its_missing_mass() -> None:
    """For the default centring the error is bounded by a few times |Qs - Qm| + missing mass x lag."""
    p = Prefix(17, lag=0.2, discrepancy=0.1, size=64)
    order = torch.argsort(p.log_mu, descending=True)
    exact = p.gradient("dlc", p.batch(3, 1.0))
    errors = []
    for kept in (8, 32, 60):
        ids = order[:kept]
        missing = 1 - float(p.log_mu[ids].exp().sum())
        errors.append(float(torch.linalg.norm(p.gradient("dlc", p.batch(3, 1.0, ids)) - exact)))
        assert errors[-1] <= 0.5 * missing
    assert errors[0] > errors[1] > errors[2]


def test_no_tail_when_the_head_is_the_whole_support() -> None:
    p = Prefix(19, size=6)
    ids = torch.arange(6)
    batch = p.batch(2, 1.0, ids)
    complete = TokenBatch(**{**batch.__dict__, "support_complete": torch.tensor([True])})
    got = p.gradient("dlc", complete)
    assert torch.linalg.norm(got - closed_form(p, 2, 1.0, "ppo", "discrepancy")) < 1e-12


@given(st.floats(-50, 50), st.floats(-50, 50), st.floats(-3, 3))
@settings(max_examples=50, deadline=None)
def test_extreme_ratios_stay_finite(lag: float, delta: float, advantage: float) -> None:
    logp = torch.tensor([-51.0], requires_grad=True)
    batch = TokenBatch(
        logp=logp,
        logp_sync=logp.detach() - lag,
        logp_mu=logp.detach() - lag - delta,
        advantages=torch.tensor([advantage]),
        mask=torch.tensor([True]),
        seq_ids=torch.tensor([0]),
        denominators=Denominators(1, 1, 1),
        head_logp_mu=torch.tensor([[-0.1, -math.inf]]),
        head_logp=torch.tensor([[-lag - 60, -80.0]]).clamp_max(0),
        head_logp_sync=torch.tensor([[-0.1, -200.0]]),
        head_ids=torch.tensor([[3, 4]]),
        head_mask=torch.tensor([[True, True]]),
    )
    for method in METHODS:
        loss, metrics = surrogate_loss(batch, correction(method))
        (grad,) = torch.autograd.grad(loss, logp)
        assert torch.isfinite(grad).all() and all(torch.isfinite(v) for v in metrics.values())


def random_batch(lengths: list[int], seed: int) -> TokenBatch:
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def logs(*shape: int) -> torch.Tensor:
        return -torch.rand(*shape, generator=g, dtype=torch.float64) - 0.1

    return TokenBatch(
        logp=logs(n).requires_grad_(),
        logp_sync=logs(n),
        logp_mu=logs(n),
        advantages=torch.randn(n, generator=g, dtype=torch.float64),
        mask=torch.ones(n, dtype=torch.bool),
        seq_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        denominators=Denominators(n, len(lengths), 32),
        head_logp_mu=logs(n, 3) - 2,
        head_logp=logs(n, 3) - 2,
        head_logp_sync=logs(n, 3) - 2,
        head_ids=torch.arange(3).expand(n, 3),
    )


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]
)
@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_add_up(method: str, aggregation: str) -> None:
    batch = random_batch([3, 1, 7, 2], 0)
    level = {"level": "sequence"} if "level" in METHODS[method].settings.model_fields else {}
    config = correction(method, aggregation=aggregation, **level)
    (whole,) = torch.autograd.grad(surrogate_loss(batch, config)[0], batch.logp)
    parts = []
    for keep in ([0, 2], [1, 3]):
        pick = torch.isin(batch.seq_ids, torch.tensor(keep))
        fields = {
            k: v[pick] if isinstance(v, torch.Tensor) else v
            for k, v in batch.__dict__.items()
            if v is not None
        }
        parts.append(surrogate_loss(TokenBatch(**fields), config)[0])
    (split,) = torch.autograd.grad(sum(parts), batch.logp)
    assert torch.allclose(whole, split, rtol=1e-12, atol=1e-14)


def test_aggregations_by_hand() -> None:
    lengths = [1, 3]
    logp = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    base = random_batch(lengths, 1)
    batch = TokenBatch(**{**base.__dict__, "logp": logp, "advantages": torch.ones(4, dtype=torch.float64)})
    want = {
        "token-mean": [1 / 4] * 4,
        "seq-mean-token-mean": [1 / 2, 1 / 6, 1 / 6, 1 / 6],
        "seq-mean-token-sum": [1 / 2] * 4,
        "constant": [1 / 64] * 4,
    }
    for aggregation, weights in want.items():
        config = correction("none", aggregation=aggregation)
        (grad,) = torch.autograd.grad(surrogate_loss(batch, config)[0], logp)
        assert torch.allclose(-grad, torch.tensor(weights, dtype=torch.float64))


def test_masked_tokens_give_nothing_even_when_not_finite() -> None:
    base = random_batch([2, 2], 2)
    logp = torch.tensor([-0.5, -0.6, -0.7, -0.8], dtype=torch.float64, requires_grad=True)
    mu = base.logp_mu.clone()
    mu[3] = math.nan
    mask = torch.tensor([True, True, True, False])
    batch = TokenBatch(**{**base.__dict__, "logp": logp, "logp_mu": mu, "mask": mask})
    (grad,) = torch.autograd.grad(surrogate_loss(batch, correction("is"))[0], logp)
    assert grad[3] == 0 and torch.isfinite(grad).all() and (grad[:3] != 0).all()


@given(st.integers(0, 10**6), st.integers(0, V - 1), st.sampled_from([-2.0, 0.7]))
@pytest.mark.parametrize(
    ("method", "config", "ref", "f"),
    [
        ("score_centering", {}, "mu", lambda r, a: torch.ones_like(r)),
        ("none", {"score_centering": True}, "mu", lambda r, a: torch.ones_like(r)),
        ("is", {"score_centering": True}, "mu", f_identity()),
        ("tis", {"score_centering": True}, "mu", f_clamp(0.0, 2.0)),
        ("ppo", {"score_centering": True}, "mu", f_ppo(0.2, 0.2, 3.0)),
        ("ppo", {"score_centering": True, "reference": "sync"}, "sync", f_ppo(0.2, 0.2, 3.0)),
    ],
)
@settings(max_examples=15, deadline=None)
def test_score_centring_composes(
    method: str, config: dict[str, object], ref: str, f: object, seed: int, a: int, advantage: float
) -> None:
    """A [ w s(a) - E_mu[w s] ] with the method's own weight; its mean under mu is 0."""
    p = Prefix(seed)
    with torch.no_grad():
        other = p.log_mu if ref == "mu" else p.log_s
        w = f(torch.exp(p.log_pi - other), torch.tensor(advantage, dtype=torch.float64))  # type: ignore[operator]
        want = advantage * (w[a] * p.score(a) - p.mean_score(p.log_mu.exp() * w))
    got = p.gradient(method, p.batch(a, advantage), **config)
    assert torch.linalg.norm(got - want) <= 1e-10 * max(1.0, float(torch.linalg.norm(want)))
    grads = [p.gradient(method, p.batch(v, advantage), **config) for v in range(V)]
    mean = sum(p.log_mu[v].exp() * grads[v] for v in range(V))
    assert torch.linalg.norm(mean) < 1e-10


def test_negative_head_ids_are_padding_without_a_mask_too() -> None:
    prefix = Prefix(4)
    head = torch.tensor([0, 3, 5])
    plain = prefix.batch(3, 1.0, head)
    assert plain.head_ids is not None and plain.head_logp is not None
    pad = torch.tensor([[-math.inf]], dtype=torch.float64)
    padded = replace(
        plain,
        head_ids=torch.cat([plain.head_ids, torch.tensor([[-1]])], 1),
        head_mask=None,
        **{
            name: torch.cat([getattr(plain, name), pad], 1)
            for name in ("head_logp_mu", "head_logp", "head_logp_sync")
        },
    )
    assert torch.equal(prefix.gradient("dlc", padded), prefix.gradient("dlc", plain))


def test_coefficient_sum_is_that_of_what_multiplies_the_scores() -> None:
    """Equal policies need no centre: mu - rho pi_theta is 0 on any head, not mu's mass."""
    prefix = Prefix(4, lag=0.0, discrepancy=0.0)
    batch = prefix.batch(3, 1.0, torch.tensor([0, 3, 5]))
    _, metrics = surrogate_loss(batch, correction("score_centering"))
    assert float(metrics["center/abs_coef_sum"]) == pytest.approx(0, abs=1e-12)
