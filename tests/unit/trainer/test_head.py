"""Chunked log-probabilities equal a dense softmax, forward and backward."""

import pytest
import torch

from leeway.corrections.clips import f_ppo
from leeway.corrections.primitives import tail_surrogate
from leeway_trainer.head import HeadLogProbs, LogitsTransform, TailQuery, TokenQuery, token_log_probs

N, D, V, K = 11, 6, 17, 4


def make(complete: bool = False, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, D, generator=g, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, generator=g, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, generator=g, dtype=dtype, requires_grad=True)
    head_ids = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(N)])
    head_mask = torch.ones(N, K, dtype=torch.bool)
    head_mask[2, 2:] = False
    targets = head_ids[:, 0].clone()
    query = TokenQuery(targets, head_ids, head_mask, torch.full((N,), complete))
    return hidden, weight, bias, query


def dense(hidden, weight, bias, query, temperature, softcap=None):
    logits = hidden @ weight.T + bias
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    if query.head_complete[0]:
        keep = torch.zeros_like(logits, dtype=torch.bool)
        rows, cols = query.head_mask.nonzero(as_tuple=True)
        keep[rows, query.head_ids[rows, cols]] = True
        logits = logits.masked_fill(~keep, -torch.inf)
    logp = logits.float().log_softmax(-1)
    head = torch.where(query.head_mask, logp.gather(-1, query.head_ids), torch.zeros(()))
    return logp.gather(-1, query.targets[:, None])[:, 0], head


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_equals_dense_softmax_forward_and_backward(complete, softcap, chunk):
    hidden, weight, bias, query = make(complete)
    transform = LogitsTransform(softcap=softcap)
    logp, head, _ = HeadLogProbs.apply(hidden, weight, bias, query, transform, 0.7, chunk, None)
    want_logp, want_head = dense(hidden, weight, bias, query, 0.7, softcap)
    torch.testing.assert_close(logp, want_logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(head, want_head, atol=1e-5, rtol=0)
    g = torch.Generator().manual_seed(5)
    a, b = torch.randn(N, generator=g), torch.randn(N, K, generator=g) * query.head_mask
    got = torch.autograd.grad((logp * a).sum() + (head * b).sum(), [hidden, weight, bias])
    want = torch.autograd.grad((want_logp * a).sum() + (want_head * b).sum(), [hidden, weight, bias])
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-5)


def test_complete_support_sums_to_one():
    hidden, weight, bias, query = make(complete=True)
    _, head, _ = token_log_probs(hidden @ weight.T + bias, query, LogitsTransform(), 1.0)
    mass = (head.exp() * query.head_mask).sum(-1)
    torch.testing.assert_close(mass, torch.ones(N, dtype=mass.dtype))


def test_mixed_support_has_no_nan_gradient():
    hidden, weight, _, query = make()
    complete = torch.zeros(N, dtype=torch.bool)
    complete[0] = True
    empty = query.head_mask.clone()
    empty[5] = False
    query = TokenQuery(query.targets, query.head_ids, empty, complete)
    logp, head, _ = HeadLogProbs.apply(hidden, weight, None, query, LogitsTransform(scale=0.5), 1.0, 3, None)
    (logp.sum() + head.sum()).backward()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_tail_equals_the_dense_sum(chunk):
    hidden, weight, bias, query = make()
    g = torch.Generator().manual_seed(7)
    tail = TailQuery(
        hidden=hidden.detach() + 0.3 * torch.randn(N, D, generator=g, dtype=torch.float64),
        weight=weight.detach() + 0.1 * torch.randn(V, D, generator=g, dtype=torch.float64),
        bias=bias.detach(),
        advantages=torch.randn(N, generator=g),
        kappa_ref=0.5 + torch.rand(N, generator=g),
        f=f_ppo(0.2, 0.2, 3.0),
    )
    query.head_complete[4] = True
    *_, found = HeadLogProbs.apply(hidden, weight, bias, query, LogitsTransform(), 0.7, chunk, tail)
    log_pi = (((hidden @ weight.T) + bias) / 0.7).float().log_softmax(-1)
    log_s = (((tail.hidden @ tail.weight.T) + tail.bias) / 0.7).float().log_softmax(-1)
    want = tail_surrogate(
        log_pi, log_s, query.head_ids, query.head_mask, tail.advantages, tail.kappa_ref, tail.f
    )
    want = want * ~query.head_complete
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    assert found[4] == 0
    assert (found[:4] != 0).all()
    a = torch.randn(N, generator=g)
    got = torch.autograd.grad((found * a).sum(), [hidden, weight, bias])
    for x, y in zip(got, torch.autograd.grad((want * a).sum(), [hidden, weight, bias]), strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-5)
