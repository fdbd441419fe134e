"""The language model as the trainer uses it: log-probabilities of given tokens at response positions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from leeway.errors import UsageError
from leeway.models.base import model_directory
from leeway.models.tensors import dtype_problems, loading_problems, read_headers, refuse, tied_problems
from leeway_trainer.attention import packed_hidden_states
from leeway_trainer.head import HeadLogProbs, LogitsTransform, TailQuery, TokenQuery
from leeway_trainer.sharing import share_prompts, shares_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from leeway_trainer.batch import MicroBatch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TokenHead(nn.Module):
    """The last linear layer.

    It shares the parameters of the model's output layer, so that ZeRO-3 gathers them around this module's
    forward and backward pass as for any other layer.
    """

    def __init__(self, output_layer: nn.Module, transform: LogitsTransform, chunk_tokens: int) -> None:
        super().__init__()
        self.weight = cast(nn.Parameter, output_layer.weight)
        self.bias: nn.Parameter | None = getattr(output_layer, "bias", None)
        self.transform = transform
        self.chunk_tokens = chunk_tokens

    def forward(
        self, hidden: Tensor, query: TokenQuery, temperature: float, tail: TailQuery | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden: [N, D] -> logp [N], head_logp [N, K], tail_logp [N], float32; as in token_log_probs."""
        logp, head_logp, tail_logp = HeadLogProbs.apply(  # type: ignore[no-untyped-call]  # torch
            hidden, self.weight, self.bias, query, self.transform, temperature, self.chunk_tokens, tail
        )
        return logp, head_logp, tail_logp


class PolicyOutput(NamedTuple):
    """For the N response tokens of a micro-batch, float32; [N, K] is padded with 0."""

    logp: Tensor
    """[N] log pi(a)"""
    head_logp: Tensor
    """[N, K] log pi(head)"""
    tail_logp: Tensor | None = None
    """[N], see TokenBatch; None unless requested."""
    hidden: Tensor | None = None
    """[N, D] input of the output layer; None unless requested."""

    def detached(self) -> PolicyOutput:
        """The log-probabilities of the tokens and heads, without gradient."""
        return PolicyOutput(self.logp.detach(), self.head_logp.detach())


class PolicyModel(nn.Module):
    """A Hugging Face causal language model whose forward gives log pi at response positions.

    Parameters are used inside this forward only, so any ZeRO stage can wrap it. Dropout is off: the policy
    that is trained is the policy that is scored. Padded micro-batches are padded on the right, where causal
    attention does not see the padding, so they need neither an attention mask nor position ids.
    """

    def __init__(self, lm: PreTrainedModel, chunk_tokens: int, source: str | Path = "") -> None:
        super().__init__()
        self.lm = lm
        self.source = str(source)
        """Directory or hub id that the model was loaded from."""
        self.head = TokenHead(lm.get_output_embeddings(), logits_transform(lm.config), chunk_tokens)
        _disable_dropout(lm)

    @property
    def shares_prompts(self) -> bool:
        """Whether it computes packed micro-batches."""
        return shares_prompts(self.lm)

    def forward(
        self, batch: MicroBatch, tail: TailQuery | None = None, with_hidden: bool = False
    ) -> PolicyOutput:
        """The log-probabilities that `batch` asks for."""
        if batch.layout is None:
            hidden = self.lm.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        else:
            hidden = packed_hidden_states(self.lm, batch.input_ids, batch.layout)
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.positions)
        logp, head_logp, tail_logp = self.head(rows, batch.query, batch.temperature, tail)
        return PolicyOutput(
            logp, head_logp, None if tail is None else tail_logp, rows if with_hidden else None
        )


def logits_transform(config: object) -> LogitsTransform:
    """How this architecture scales or caps its logits, from the keys that configurations use for it."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    divisor = getattr(config, "logits_scaling", None) or 1.0
    factor = getattr(config, "logit_scale", None) or 1.0
    return LogitsTransform(scale=factor / divisor, softcap=getattr(config, "final_logit_softcapping", None))


def load_policy_model(
    directory: str | Path, *, dtype: torch.dtype, chunk_tokens: int, trust_remote_code: bool = False
) -> PolicyModel:
    """Load a Hugging Face directory (or hub id) on the CPU, in `dtype`. It shares prompts if it can.

    Raises UsageError when there is no causal language model there, when its tensors are not exactly those of
    its architecture, or when the trainer does not reproduce its logits.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        lm, info = AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that all of them are reported
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"cannot load a causal language model from {directory}: {error}. "
            "model.name must be a directory in Hugging Face format (config.json, *.safetensors) or a hub id"
        ) from error
    names = [name for name, _ in lm.named_parameters()]
    source = model_directory(directory)
    stored = read_headers(source)
    problems = [*loading_problems(info), *dtype_problems(stored, names)]
    refuse(directory, problems or tied_problems(source, lm, stored))
    model = PolicyModel(lm, chunk_tokens, directory)
    check_logits(model)
    share_prompts(lm)
    return model


@torch.no_grad()
def check_logits(model: PolicyModel) -> None:
    """Compare our logits with the model's on eight tokens; raises UsageError when they differ.

    Some architectures rescale their logits in other ways, and training on wrong logits would fail silently.
    """
    vocabulary = model.head.weight.shape[0]
    ids = torch.arange(1, 9).remainder(vocabulary).unsqueeze(0)
    expected = torch.log_softmax(model.lm(input_ids=ids, use_cache=False).logits[0, -1].float(), dim=-1)
    hidden = model.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, -1:]
    every = torch.arange(expected.shape[0]).unsqueeze(0)
    query = TokenQuery(
        every[:, 0], every, torch.ones_like(every, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
    )
    _, found, _ = model.head(hidden, query, 1.0)
    worst = float((found[0] - expected).abs().max())
    if not worst < 0.05:
        raise UsageError(
            f"{type(model.lm).__name__} transforms its logits in a way that the trainer does not support "
            f"(log-probabilities differ by {worst:.3g}, at most 0.05 expected)"
        )


def _disable_dropout(lm: nn.Module) -> None:
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]  # the models keep a float here
