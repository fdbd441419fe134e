"""Log-probabilities of a few tokens per position, without ever holding the logits of a whole batch.

A position costs vocabulary x 4 bytes of float32 logits, so the logits of 4,096 positions over 150,000
tokens take 2.4 GB. `HeadLogProbs` processes the positions in chunks and keeps only the requested tokens; its
backward pass recomputes the logits chunk by chunk. The layer runs in float32, with a float32 copy of its
weight that exists during one pass, because the samplers do the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leeway.corrections.clips import Clip
from leeway.corrections.primitives import tail_surrogate


@dataclass(frozen=True)
class LogitsTransform:
    """What an architecture does to the output of its last linear layer before the softmax.

    logits = softcap * tanh(scale * z / softcap), or scale * z without a softcap.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, z: Tensor, temperature: float) -> Tensor:
        """z: [n, V] float32 -> logits / temperature, [n, V] float32."""
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z if temperature == 1.0 else z / temperature


@dataclass(frozen=True)
class TokenQuery:
    """Which log-probabilities to compute at N positions.

    targets: [N] int64, the sampled tokens. head_ids: [N, K] int64; entries with head_mask False are
    padding. head_mask: [N, K] bool. head_complete: [N] bool; True where the head is the complete support of a
    truncated distribution, over which the log-probabilities of that position are then normalised. Such a
    position has at least one head entry.
    """

    targets: Tensor
    head_ids: Tensor
    head_mask: Tensor
    head_complete: Tensor

    def rows(self, start: int, stop: int) -> TokenQuery:
        """The same for positions start..stop."""
        part = slice(start, stop)
        return TokenQuery(
            self.targets[part], self.head_ids[part], self.head_mask[part], self.head_complete[part]
        )


@dataclass(frozen=True)
class TailQuery:
    """theta_s at the same N positions, for the part of a centre outside the head.

    hidden: [N, D] of theta_s; weight: [V, D], bias: [V] or None, its output layer. advantages, kappa_ref: [N]
    and the clip f, as in leeway.corrections.primitives.tail_surrogate.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    advantages: Tensor
    kappa_ref: Tensor
    f: Clip

    def rows(self, start: int, stop: int) -> TailQuery:
        """The same for positions start..stop."""
        part = slice(start, stop)
        return replace(
            self,
            hidden=self.hidden[part],
            advantages=self.advantages[part],
            kappa_ref=self.kappa_ref[part],
        )

    def float32(self) -> TailQuery:
        """The same with a float32 output layer."""
        bias = None if self.bias is None else self.bias.float()
        return replace(self, weight=self.weight.float(), bias=bias)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """hidden: [n, D]; weight: [V, D] and bias: [V] or None, both float32 -> [n, V] float32."""
    # bfloat16 would round logits by up to 2^-9 of their size, which is 0.03 nats at 16.
    return F.linear(hidden.to(weight.dtype), weight, bias)


def token_log_probs(
    z: Tensor,
    query: TokenQuery,
    transform: LogitsTransform,
    temperature: float,
    tail: TailQuery | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log softmax(logits / temperature) at the queried tokens, normalised in float32.

    z: [n, V] float32, output of the linear layer -> logp [n], head_logp [n, K] and tail_logp [n], float32.
    head_logp is 0 at padding (multiply or mask it; it carries no gradient); tail_logp is 0 where the head is
    complete, and everywhere without `tail`.
    """
    logits = transform(z, temperature)
    logp = logits.gather(-1, query.targets.unsqueeze(-1)).squeeze(-1)
    head = logits.gather(-1, query.head_ids)
    norm = torch.logsumexp(logits, dim=-1)
    if bool(query.head_complete.any()):
        outside = ~query.head_mask & query.head_complete.unsqueeze(-1)
        support_norm = torch.logsumexp(head.masked_fill(outside, -torch.inf), dim=-1)
        norm = torch.where(query.head_complete, support_norm, norm)
    head_logp = (head - norm.unsqueeze(-1)).masked_fill(~query.head_mask, 0.0)
    if tail is None:
        return logp - norm, head_logp, torch.zeros_like(norm)
    with torch.no_grad():
        logp_sync = torch.log_softmax(transform(linear(tail.hidden, tail.weight, tail.bias), temperature), -1)
    tail_logp = tail_surrogate(
        logits - norm.unsqueeze(-1), logp_sync, query.head_ids, query.head_mask,
        tail.advantages, tail.kappa_ref, tail.f,
    )  # fmt: skip
    return logp - norm, head_logp, tail_logp.masked_fill(query.head_complete, 0.0)


class HeadLogProbs(torch.autograd.Function):
    """`token_log_probs` in chunks of positions, with the logits recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        query: TokenQuery,
        transform: LogitsTransform,
        temperature: float,
        chunk_tokens: int,
        tail: TailQuery | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden: [N, D] -> logp [N], head_logp [N, K], tail_logp [N], float32; `chunk_tokens` positions at a
        time.
        """
        ctx.save_for_backward(hidden, weight, bias)
        ctx.query, ctx.transform, ctx.temperature, ctx.chunk = query, transform, temperature, chunk_tokens
        ctx.tail = tail
        weight32, bias32 = weight.float(), None if bias is None else bias.float()
        tail32 = None if tail is None else tail.float32()
        parts = [
            token_log_probs(
                linear(hidden[i : i + chunk_tokens], weight32, bias32),
                query.rows(i, i + chunk_tokens),
                transform,
                temperature,
                None if tail32 is None else tail32.rows(i, i + chunk_tokens),
            )
            for i in range(0, hidden.shape[0], chunk_tokens)
        ]
        logp, head_logp, tail_logp = zip(*parts, strict=True)
        return torch.cat(logp), torch.cat(head_logp), torch.cat(tail_logp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weight and bias; weight and bias sum over the chunks in float32."""
        hidden, weight, bias = ctx.saved_tensors
        tail32 = None if ctx.tail is None else ctx.tail.float32()
        weight32, bias32 = weight.float(), None if bias is None else bias.float()
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight32)
        grad_bias = None if bias32 is None else torch.zeros_like(bias32)
        for i in range(0, hidden.shape[0], ctx.chunk):
            part = slice(i, i + ctx.chunk)
            z = linear(hidden[part], weight32, bias32).requires_grad_()
            with torch.enable_grad():
                out = token_log_probs(
                    z,
                    ctx.query.rows(i, i + ctx.chunk),
                    ctx.transform,
                    ctx.temperature,
                    None if tail32 is None else tail32.rows(i, i + ctx.chunk),
                )
            wanted = [(o, g[part]) for o, g in zip(out, grads, strict=True) if o.requires_grad]
            (grad_z,) = torch.autograd.grad([o for o, _ in wanted], z, [g for _, g in wanted])
            grad_hidden[part] = grad_z @ weight32
            grad_weight.addmm_(grad_z.T, hidden[part].to(weight32.dtype))
            if grad_bias is not None:
                grad_bias += grad_z.sum(0)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )
