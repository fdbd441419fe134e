"""The other methods against their published forms, on explicit softmax policies in float64."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from correction_support import correction
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.config import CorrectionConfig
from leeway.config.correction import METHOD_CHOICE
from leeway.corrections import METHODS, Denominators, TokenBatch, lr_scale, prepare, surrogate_loss
from leeway.corrections.m2 import budget_clip, suffix_cut, trust_region

Tensor = torch.Tensor


def whole_batch(seed: int, lengths: tuple[int, ...] = (3, 1, 5, 2), scale: float = 0.5) -> TokenBatch:
    """Log-probabilities of drawn tokens alone; `logp` is a leaf, so its gradient is each token's weight."""
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def noise() -> Tensor:
        return scale * torch.randn(n, generator=g, dtype=torch.float64)

    logp = (-1 - torch.rand(n, generator=g, dtype=torch.float64)).requires_grad_()
    sync = logp.detach() + noise()
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return TokenBatch(
        logp=logp,
        logp_sync=sync,
        logp_mu=sync + noise() / 3,
        advantages=torch.randn(len(lengths), generator=g, dtype=torch.float64)[ids],
        mask=torch.ones(n, dtype=torch.bool),
        seq_ids=ids,
        denominators=Denominators(n, len(lengths), 8),
    )


def ascent(method: str, batch: TokenBatch, **config: object) -> Tensor:
    """[N] minus d loss / d logp, times the number of tokens for token-mean."""
    loss, _ = surrogate_loss(batch, correction(method, aggregation="token-mean", **config))
    (grad,) = torch.autograd.grad(loss, batch.logp)
    return -grad * batch.denominators.tokens


def sequence_sums(x: Tensor, batch: TokenBatch) -> Tensor:
    return torch.stack([x[batch.seq_ids == i].sum() for i in batch.seq_ids])


seeds = st.integers(0, 10**6)
relaxed = settings(max_examples=30, deadline=None)


@given(seeds)
@relaxed
def test_weights_of_the_importance_sampling_family(seed: int) -> None:
    b = whole_batch(seed)
    a, rho = b.advantages, torch.exp(b.logp.detach() - b.logp_mu)
    whole = torch.exp(sequence_sums(b.logp.detach() - b.logp_mu, b))
    band = (rho >= 0.5) & (rho <= 5)
    zero, one = torch.zeros_like(rho), torch.ones_like(rho)
    cases = [
        (ascent("none", b), a),
        (ascent("is", b), a * rho),
        (ascent("is", b, level="sequence"), a * whole),
        (ascent("tis", b), a * rho.clamp(max=2)),
        (ascent("tis", b, level="sequence", clip=3.0), a * whole.clamp(max=3)),
        (ascent("mis", b), a * torch.where(band, rho, zero)),
        (ascent("icepop", b), a * torch.where(band, rho, zero)),
        (ascent("mis", b, inside="one"), a * torch.where(band, one, zero)),
        (ascent("mis", b, outside="clamp"), a * rho.clamp(0.5, 5)),
        (ascent("vcpo", b), a * whole.clamp(max=8)),
    ]
    for got, want in cases:
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-14)


@given(seeds, st.sampled_from(["mu", "sync", "prox"]))
@relaxed
def test_ppo_is_the_clipped_surrogate(seed: int, ref: str) -> None:
    b = whole_batch(seed, scale=1.0)
    b = replace(b, logp_prox=b.logp_sync - 0.2)
    logp_ref = {"mu": b.logp_mu, "sync": b.logp_sync, "prox": b.logp_prox}[ref]
    r = torch.exp(b.logp - logp_ref)
    surrogate = torch.minimum(r * b.advantages, r.clamp(0.8, 1.2) * b.advantages)
    dual = torch.maximum(surrogate, 3 * b.advantages)
    surrogate = torch.where(b.advantages < 0, dual, surrogate)
    (want,) = torch.autograd.grad(surrogate.sum(), b.logp)
    assert torch.allclose(ascent("ppo", b, reference=ref), want, rtol=1e-12, atol=1e-14)


@given(seeds)
@relaxed
def test_decoupled_ppo_recomputed(seed: int) -> None:
    b = whole_batch(seed, scale=1.0)
    prox = b.logp_sync - 0.1
    b = replace(b, logp_prox=prox)
    w = torch.exp(prox - b.logp_mu)
    r = torch.exp(b.logp - prox)
    surrogate = w * torch.minimum(r * b.advantages, r.clamp(0.8, 1.2) * b.advantages)
    (want,) = torch.autograd.grad(torch.where(w <= 5, surrogate, torch.zeros_like(w)).sum(), b.logp)
    assert torch.allclose(ascent("decoupled_ppo", b), want, rtol=1e-12, atol=1e-14)


@given(seeds, st.integers(0, 9))
@relaxed
def test_decoupled_ppo_loglinear(seed: int, age: int) -> None:
    """Weights of A-3PO: w = (pi_theta/mu)^alpha, r = (pi_theta/mu)^(1-alpha), alpha = (d-1)/d."""
    b = whole_batch(seed, scale=0.1)
    b = replace(b, age=torch.full_like(b.logp_mu, float(age)))
    alpha = (age - 1) / age if age > 0 else 0.0
    full = torch.exp(b.logp.detach() - b.logp_mu)
    w, r = full**alpha, full ** (1 - alpha)
    gate = torch.where(b.advantages >= 0, r <= 1.2, r >= 0.8)
    want = b.advantages * w * torch.where(gate, r, torch.zeros_like(r))
    got = ascent("decoupled_ppo", b, prox_logp_method="loglinear", behave_weight_cap=None)
    assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)


@given(seeds, st.sampled_from(["mu", "sync"]))
@relaxed
def test_gspo_gradient_is_the_sequence_form(seed: int, ref: str) -> None:
    b = whole_batch(seed, scale=3e-4)
    logp_ref = b.logp_mu if ref == "mu" else b.logp_sync
    total = torch.zeros((), dtype=torch.float64)
    for i in range(4):
        own = b.seq_ids == i
        s, a = torch.exp((b.logp - logp_ref)[own].mean()), b.advantages[own][0]
        total = total + torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a) / 4
    (want,) = torch.autograd.grad(total, b.logp)
    loss, _ = surrogate_loss(b, correction("gspo", reference=ref))
    (got,) = torch.autograd.grad(-loss, b.logp)
    assert torch.allclose(got, want, rtol=1e-10, atol=1e-14)


def test_equal_log_ratios_stay_or_go_together() -> None:
    """Two of three tokens cannot be told apart, and with both the mean is above the threshold."""
    assert suffix_cut(torch.tensor([0.0, 0.0625, 0.0625]), 0.03125) == 0
    assert suffix_cut(torch.tensor([0.0, 0.0625, 0.0625]), 0.0625) == 0.0625


def test_m2po_of_areal_looks_at_the_proximal_policy_that_its_loss_uses() -> None:
    """A-3PO at age 1: pi_prox is mu, so no token is far from it and the loss is decoupled PPO's."""
    b = whole_batch(2, scale=2.0)
    b = replace(b, age=torch.ones_like(b.logp_mu))
    loglinear = {"prox_logp_method": "loglinear"}
    got = ascent("m2po", b, variant="areal", **loglinear)
    assert torch.allclose(got, ascent("decoupled_ppo", b, **loglinear), rtol=1e-12)


def test_settings_of_another_method_are_refused_by_the_loss_too() -> None:
    settings_ = correction("tis").model_copy(update={"method": "gspo"})
    with pytest.raises(TypeError, match="correction gspo: expected GspoConfig, got TisConfig"):
        surrogate_loss(whole_batch(0), settings_)


def drop_one_by_one(m2: list[float], threshold: float) -> list[float]:
    """Algorithm 1 of M2PO, taken literally."""
    kept = sorted(m2)
    while kept and sum(kept) / len(kept) > threshold:
        kept.pop()
    return kept


@given(st.lists(st.floats(1e-6, 4), max_size=40, unique=True), st.floats(1e-3, 1))
def test_the_cut_is_the_while_loop(m2: list[float], threshold: float) -> None:
    cut = suffix_cut(torch.tensor(m2, dtype=torch.float64), threshold)
    assert [v for v in sorted(m2) if v <= cut] == drop_one_by_one(m2, threshold)


@given(st.lists(st.floats(0, 4), min_size=1, max_size=40), st.floats(1e-3, 1))
def test_the_budget_is_met(m2: list[float], budget: float) -> None:
    x = torch.tensor(m2, dtype=torch.float64)
    clip = budget_clip(x, budget)
    if math.isinf(clip):
        assert float(x.mean()) <= budget
    else:
        assert float(x.clamp(max=clip**2).mean()) == pytest.approx(budget, rel=1e-9)


@given(seeds)
@relaxed
def test_m2po_of_the_paper(seed: int) -> None:
    b = whole_batch(seed)
    log_ratio = b.logp.detach() - b.logp_mu
    region = trust_region(log_ratio, b.advantages)
    kept = drop_one_by_one((log_ratio[region] ** 2).tolist(), 0.04)
    masked_out = region & ~torch.tensor([float(v) in kept for v in log_ratio**2])
    want = torch.where(masked_out, torch.zeros_like(log_ratio), b.advantages * log_ratio.exp())
    assert torch.allclose(ascent("m2po", b), want, rtol=1e-12)


@given(seeds)
@relaxed
def test_m2po_variants(seed: int) -> None:
    b = whole_batch(seed)
    b = replace(b, logp_prox=b.logp_sync)
    log_ratio = b.logp_sync - b.logp_mu
    kept = drop_one_by_one((log_ratio**2).tolist(), 0.04)
    keep = torch.tensor([float(v) in kept for v in log_ratio**2])
    decoupled = ascent("decoupled_ppo", b)
    want = torch.where(keep, decoupled, torch.zeros_like(decoupled)) / max(float(keep.double().mean()), 1e-9)
    assert torch.allclose(ascent("m2po", b, variant="areal"), want, rtol=1e-12)
    # The authors' code never clips tighter than PPO with 0.3 and 0.5, which a tiny budget would ask for.
    tight = ascent("m2po", b, variant="repo", threshold=1e-9)
    assert torch.allclose(tight, ascent("ppo", b, clip_low=0.3, clip_high=0.5), rtol=1e-12)
    loose = ascent("m2po", b, variant="repo", threshold=1e9, dual_clip=1e9)
    assert torch.allclose(loose, ascent("is", b), rtol=1e-12)


@pytest.mark.parametrize("variant", ["paper", "areal", "repo"])
def test_m2po_on_micro_batches_follows_what_was_prepared_on_the_whole(variant: str) -> None:
    b = whole_batch(5)
    config = correction("m2po", variant=variant)
    (whole,) = torch.autograd.grad(surrogate_loss(b, config)[0], b.logp)
    found = prepare(b, config)
    parts = []
    for pick in (b.seq_ids < 2, b.seq_ids >= 2):
        fields = {k: v[pick] if isinstance(v, Tensor) else v for k, v in b.__dict__.items()}
        parts.append(surrogate_loss(TokenBatch(**{**fields, "prepared": found}), config)[0])
    (split,) = torch.autograd.grad(sum(parts), b.logp)
    assert torch.allclose(whole, split, rtol=1e-12)


def test_vcpo_scales_the_learning_rate() -> None:
    """The worked value of its paper: weights [1, 1, 1, 9] give ESS 144/84 of 4, sqrt factor 0.6547."""
    b = whole_batch(0, lengths=(1, 1, 1, 1))
    b = replace(b, logp_mu=b.logp.detach() - torch.tensor([1.0, 1.0, 1.0, 9.0], dtype=torch.float64).log())
    assert lr_scale(b, correction("vcpo")) == pytest.approx(0.6547, abs=1e-4)
    assert lr_scale(b, correction("vcpo", scaling="linear")) == pytest.approx(3 / 7)
    assert lr_scale(b, correction("vcpo", base_ess=0.25)) == 1.0
    assert lr_scale(b, correction("dlc")) == 1.0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "vcpo", "baseline": "opob"}, "every response's own gradient"),
        ({"method": "dlc", "score_centering": True}, "score_centering\n.*not permitted"),
        ({"method": "gspo", "score_centering": True}, "score_centering\n.*not permitted"),
        ({"method": "tis", "score_centering": True, "level": "sequence"}, "set level=token"),
        ({"method": "ppo", "score_centering": True, "reference": "prox"}, "reference mu or sync"),
        ({"method": "mis", "low": 6.0}, "must be below high"),
        ({"method": "icepop", "low": 6.0}, "must be below high"),
        ({"method": "tis", "clip_low": 6.0}, "must be below clip"),
        ({"method": "dlc", "clamp_low": 6.0}, "must be below clamp_high"),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        correction(**config)  # type: ignore[arg-type]


READ: set[str] = set()


def recorded(settings_: CorrectionConfig) -> CorrectionConfig:
    """The same settings, which note in READ what is read of them."""
    model = type(settings_)

    class Recorded(model):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            if name in model.model_fields:
                READ.add(name)
            return super().__getattribute__(name)

    return Recorded.model_construct(**settings_.model_dump())


@pytest.mark.parametrize("method", METHODS)
def test_every_key_of_a_method_is_read(method: str) -> None:
    b = whole_batch(0)
    head = torch.log_softmax(torch.randn(len(b.logp), 5, dtype=torch.float64), 1)[:, :4]
    b = replace(b, head_logp_mu=head, head_logp=head, head_logp_sync=head)
    fields = METHODS[method].settings.model_fields.items()
    choices = [
        {k: v} for k, f in fields if get_origin(f.annotation) is Literal for v in get_args(f.annotation)
    ]
    own = set(METHOD_CHOICE.own_keys(method))
    READ.clear()
    for choice in [*choices, *([{"score_centering": True}] if "score_centering" in own else [])]:
        try:
            config = recorded(correction(**{"method": method, **choice}))
        except ValueError:
            continue  # a value that is refused
        surrogate_loss(b, config)
        prepare(b, config)
        lr_scale(b, config)
        config.needs_sync_tail  # noqa: B018  what the trainer asks
    # Of VCPO's baseline only one value is allowed, so nothing has to read it.
    assert READ - {"method", *METHOD_CHOICE.common_keys} == own - {"baseline"}
    centred = METHODS[method].weight is not None
    assert centred == ("head_tail" in own)


@given(seeds, st.sampled_from(sorted(METHODS)))
@settings(max_examples=60, deadline=None)
def test_extreme_ratios_stay_finite(seed: int, method: str) -> None:
    if correction(method).needs_head:
        return  # see test_methods.py
    b = whole_batch(seed, scale=50.0)
    loss, metrics = surrogate_loss(b, correction(method))
    (grad,) = torch.autograd.grad(loss, b.logp)
    assert torch.isfinite(grad).all()
    assert all(math.isfinite(float(v)) for v in metrics.values())


def test_corrections_need_neither_engines_nor_redis() -> None:
    code = (
        "import sys; from leeway.corrections import METHODS, surrogate_loss, ess; assert METHODS;"
        "print([m for m in ('vllm', 'deepspeed', 'redis', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
