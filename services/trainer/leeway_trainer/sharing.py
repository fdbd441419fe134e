"""Whether a model can compute packed rows, in which the responses to one prompt share its tokens.

It can if every layer mixes tokens by attention alone, this attention can be replaced, and positions come
from position ids. Recurrent and convolutional layers run through the row, so a response would depend on its
siblings.
"""

from __future__ import annotations

import inspect
import logging
from functools import cache
from typing import TYPE_CHECKING

import torch

from leeway_trainer import attention
from leeway_trainer.attention import packed_hidden_states
from leeway_trainer.packing import Group, packed_layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

LAYER_TYPES = {"full_attention", "sliding_attention"}
"""What may be in `layer_types` of a configuration."""
PADDED = "sdpa"
"""The attention implementation of models that cannot share prompts."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Maximum relative difference of hidden states between packed and single sequences. Rounding stays far below;
a sibling that is seen, or a wrong position, is far above in a pretrained model.
"""


def share_prompts(lm: PreTrainedModel) -> bool:
    """Give `lm` the attention for packed rows if it can compute them; otherwise log why not."""
    reason = obstacle(lm)
    if reason is None:
        attention.register()
        lm.set_attn_implementation(attention.IMPLEMENTATION)
        reason = _mismatch(lm)
        if reason is None:
            return True
        lm.set_attn_implementation(PADDED)
    _report(type(lm).__name__, reason)
    return False


def _mismatch(lm: PreTrainedModel) -> str | None:
    if not shares_prompts(lm):
        return "its attention implementation cannot be replaced"
    try:
        found = difference(lm)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if not found <= TOLERANCE[lm.dtype]:
        return f"hidden states differ by {found:.2g} from those of single sequences"
    return None


@cache
def _report(name: str, reason: str) -> None:
    # Once, although theta and theta_s are two models.
    log.info("%s: prompts are computed once per response, in padded batches: %s", name, reason)


def shares_prompts(lm: PreTrainedModel) -> bool:
    """Whether `lm` computes packed rows."""
    name: str = lm.config.get_text_config()._attn_implementation
    return name == attention.IMPLEMENTATION


def obstacle(lm: PreTrainedModel) -> str | None:
    """Why `lm` cannot compute packed rows, from its configuration and code; None if nothing is known."""
    config = lm.config.get_text_config()
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    parameters = inspect.signature(type(lm.base_model).forward).parameters
    if getattr(lm, "_is_stateful", False):
        return "it has recurrent layers"
    if other := kinds - LAYER_TYPES:
        return f"it has layers of type {', '.join(sorted(other))}"
    if not getattr(lm, "_supports_attention_backend", False):
        return "its attention implementation cannot be replaced"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return "it has cross-attention"
    if "position_ids" not in parameters:
        return "it takes no position ids"
    windowed = getattr(config, "sliding_window", None) or "sliding_attention" in kinds
    if windowed and not getattr(lm, "_supports_flash_attn", False):
        return "its attention may not know its sliding window"  # flash attention has to be told
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return "it passes no arguments to its attention"
    return None


@torch.no_grad()
def difference(lm: PreTrainedModel) -> float:
    """Relative difference between the hidden states of two responses in a packed row and of each one alone.

    The median over tokens, because rounding may change which experts a router chooses for a single token.
    """
    prompt, responses = [5, 3, 7], ([2, 9, 4, 8], [6, 1, 9])
    vocabulary = lm.get_input_embeddings().weight.shape[0]
    groups = [Group(len(prompt), tuple(len(r) for r in responses))] * 2
    row = torch.tensor([*prompt, *responses[0], *responses[1]] * 2) % vocabulary
    packed = packed_hidden_states(lm, row[None], packed_layout(groups))[0, len(row) // 2 :]
    found, wanted, at = [], [], len(prompt)
    for response in responses:
        ids = torch.tensor([*prompt, *response]) % vocabulary
        alone = lm.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        wanted.append(alone[len(prompt) :])
        found.append(packed[at : at + len(response)])
        at += len(response)
    expected = torch.cat(wanted).float()
    error = (torch.cat(found).float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(error.median())
