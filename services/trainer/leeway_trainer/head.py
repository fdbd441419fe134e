"""Log-probabilities of a few tokens per position, without ever holding the logits of a whole batch.

A position costs vocabulary x 4 bytes of float32 logits, so a batch of 4,096 positions over 150,000 tokens
is 2.4 GB for the logits alone. `HeadLogProbs` walks through the positions in chunks and keeps only what was
asked for; its backward pass computes the logits of a chunk once more. The layer is computed in float32,
from a float32 copy of its weight that lives as long as one pass, because the samplers do the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LogitsTransform:
    """What an architecture does to the output of its last linear layer before the softmax.

    logits = softcap * tanh(scale * z / softcap), or scale * z without a softcap.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, z: Tensor) -> Tensor:
        """z: [n, V] float32 -> logits [n, V] float32."""
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z


@dataclass(frozen=True)
class TokenQuery:
    """Which log-probabilities are wanted at N positions.

    targets: [N] int64, the sampled tokens. head_ids: [N, K] int64; entries with head_mask False are
    padding. head_mask: [N, K] bool. head_complete: [N] bool; True where the head is the whole support of a
    truncated distribution, over which the
        log-probabilities of that position are then normalised. Such a position has at least one head entry.
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


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    query: TokenQuery,
    transform: LogitsTransform,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at the queried tokens, normalised in float32.

    hidden: [n, D]; weight: [V, D] and bias: [V] or None, both float32 -> logp [n] and head_logp [n, K],
    float32. head_logp is 0 at padding (multiply or mask it; it carries no gradient).
    """
    # Logits rounded to bfloat16 would be off by up to 2^-9 of their size, 0.03 nats at 16.
    logits = transform(F.linear(hidden.to(weight.dtype), weight, bias)) / temperature
    logp = logits.gather(-1, query.targets.unsqueeze(-1)).squeeze(-1)
    head = logits.gather(-1, query.head_ids)
    norm = torch.logsumexp(logits, dim=-1)
    if bool(query.head_complete.any()):
        outside = ~query.head_mask & query.head_complete.unsqueeze(-1)
        support_norm = torch.logsumexp(head.masked_fill(outside, -torch.inf), dim=-1)
        norm = torch.where(query.head_complete, support_norm, norm)
    return logp - norm, (head - norm.unsqueeze(-1)).masked_fill(~query.head_mask, 0.0)


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
    ) -> tuple[Tensor, Tensor]:
        """hidden: [N, D] -> logp [N], head_logp [N, K], both float32; chunk_tokens positions at a time."""
        ctx.save_for_backward(hidden, weight, bias)
        ctx.query, ctx.transform, ctx.temperature, ctx.chunk = query, transform, temperature, chunk_tokens
        weight32, bias32 = weight.float(), None if bias is None else bias.float()
        parts = [
            token_log_probs(
                hidden[i : i + chunk_tokens],
                weight32,
                bias32,
                query.rows(i, i + chunk_tokens),
                transform,
                temperature,
            )
            for i in range(0, hidden.shape[0], chunk_tokens)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weight and bias; those of the weights are summed over the chunks in
        float32.
        """
        hidden, weight, bias = ctx.saved_tensors
        grad_logp, grad_head = grads
        grad_hidden = torch.empty_like(hidden)
        wanted = [p for p in (weight, bias) if p is not None]
        sums = [torch.zeros(p.shape, dtype=torch.float32, device=p.device) for p in wanted]
        leaves = [p.detach().float().requires_grad_() for p in wanted]
        for i in range(0, hidden.shape[0], ctx.chunk):
            part = slice(i, i + ctx.chunk)
            rows = hidden[part].detach().requires_grad_()
            with torch.enable_grad():
                out = token_log_probs(
                    rows,
                    leaves[0],
                    leaves[1] if bias is not None else None,
                    ctx.query.rows(i, i + ctx.chunk),
                    ctx.transform,
                    ctx.temperature,
                )
            found = torch.autograd.grad(out, [rows, *leaves], [grad_logp[part], grad_head[part]])
            grad_hidden[part] = found[0]
            for total, grad in zip(sums, found[1:], strict=True):
                total.add_(grad)
        out_grads = [total.to(p.dtype) for total, p in zip(sums, wanted, strict=True)]
        grad_bias = out_grads[1] if bias is not None else None
        return grad_hidden, out_grads[0], grad_bias, None, None, None, None
