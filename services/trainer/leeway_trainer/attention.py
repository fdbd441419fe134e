"""Attention over packed rows, as an attention implementation of transformers.

A model with the implementation IMPLEMENTATION computes a packed row when its forward receives
`packed_layout`. Otherwise it computes what "sdpa" computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leeway_trainer.packing import PackedLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "leeway_packed"


def register() -> None:
    """Make IMPLEMENTATION known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def packed_hidden_states(lm: PreTrainedModel, input_ids: Tensor, layout: PackedLayout) -> Tensor:
    """input_ids: [1, T], a packed row -> [1, T, hidden size]."""
    hidden: Tensor = lm.base_model(
        input_ids=input_ids,
        position_ids=layout.position_ids[None],
        attention_mask=layout.prepared_mask,
        packed_layout=layout,
        use_cache=False,
    ).last_hidden_state
    return hidden


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature that transformers expects.

    query: [B, H, T, D], key, value: [B, H_kv, T, D] -> [B, T, H, D]; B is 1 with a layout.
    """
    if packed_layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return output
    return packed_attention(query, key, value, packed_layout, scaling, sliding_window), None


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float | None = None,
    window: int | None = None,
) -> Tensor:
    """query: [1, H, T, D], key, value: [1, H_kv, T, D] -> [1, T, H, D].

    `window`: a token sees the last `window` positions, itself included.
    """
    grouped = query.shape[1] != key.shape[1]
    parts = []
    for block in layout.blocks:
        mask = block.mask(window)
        found = F.scaled_dot_product_attention(
            _gather(query, block.queries), _gather(key, block.keys), _gather(value, block.keys),
            attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped,
        )  # fmt: skip
        parts.append(found.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, layout.restore).unsqueeze(0)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    # [1, H, T, D], [B, Q] -> [B, H, Q, D]
    tokens = x[0].transpose(0, 1)
    rows = tokens.index_select(0, index.flatten())
    return rows.view(*index.shape, *tokens.shape[1:]).transpose(1, 2)
