"""The tiny model: log-probabilities, drawing, and the sampler's numerics."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leeway.config import ModelConfig
from leeway.tasks import encode_prompt, load_task
from leeway.tasks.kinds.digits import DigitsConfig
from leeway_host.models import prepare_model
from leeway_lab.spec import Condition, ModelSpec

INT4_GROUP = 32
MAX_LENGTH = 48
EXCLUDED = -1e4
"""Logit of a token outside the support: no probability, and finite, so that 0 x log 0 is 0."""


@dataclass(frozen=True)
class Drawn:
    """B responses of up to T tokens to prompts of P tokens.

    ids [B, P + T]; mask [B, T] true up to and with the end token; logp [B, T, V] of the distribution that the
    sampler reports for each token; support [B, T, V], the tokens that could be drawn (None: all).
    """

    ids: Tensor
    mask: Tensor
    logp: Tensor
    prompt: int
    support: Tensor | None = None

    @property
    def responses(self) -> Tensor:
        """[B, T]"""
        return self.ids[:, self.prompt :]


class Task:
    """Digits to sort, as token ids of one length; the reward is the share of correct positions."""

    def __init__(self, spec: ModelSpec, tokenizer: Any, size: int = 4096) -> None:
        config = task_config(spec, size)
        self._task = load_task(config)
        self._tokenizer = tokenizer
        self.size = size
        self.max_new = spec.length + 2
        self.eos = int(tokenizer.eos_token_id)
        self._items = [self._task.item(i) for i in range(size)]
        self.prompts = torch.tensor([encode_prompt(tokenizer, item, config) for item in self._items])
        """[size, P]"""
        self.digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
        spare = [i for t, i in tokenizer.get_vocab().items() if t.startswith("<unused")]
        self.spare = torch.tensor([spare[i % len(spare)] for i in range(10)])
        """[10] ids that the task never uses."""

    def rewards(self, items: list[int], drawn: Drawn) -> Tensor:
        """[B] float64 in [0, 1]."""
        found = []
        for item, row, mask in zip(items, drawn.responses.tolist(), drawn.mask.tolist(), strict=True):
            kept = [t for t, used in zip(row, mask, strict=True) if used and t != self.eos]
            found.append(self._task.verify(self._items[item], self._tokenizer.decode(kept)))
        return torch.tensor(found, dtype=torch.float64)


def task_config(spec: ModelSpec, size: int = 4096) -> DigitsConfig:
    """The task as the product configures it."""
    return DigitsConfig(params={"length": spec.length}, reward="verifier", size=size)


def base_directory(spec: ModelSpec) -> Path:
    """Directory of theta_0 and its tokenizer; built and warmed up on first use, then cached."""
    params = {
        "hidden": spec.hidden,
        "layers": spec.layers,
        "heads": spec.heads,
        "vocab": 104,
        "target_accuracy": spec.target_accuracy,
    }
    config = ModelConfig(name="tiny", max_length=MAX_LENGTH, params=params)
    return prepare_model(config, task=task_config(spec), seed=0)


def load_base(spec: ModelSpec) -> tuple[nn.Module, Any]:
    """theta_0 in float32 and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory = base_directory(spec)
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(str(directory))


def response_logp(model: nn.Module, drawn: Drawn) -> Tensor:
    """[B, T, V] log-probabilities at the positions of the response, on its support if it has one."""
    logits = model(input_ids=drawn.ids[:, :-1], use_cache=False).logits[:, drawn.prompt - 1 :].float()
    if drawn.support is not None:
        logits = logits.masked_fill(~drawn.support, EXCLUDED)
    return torch.log_softmax(logits, -1)


@torch.no_grad()
def draw(
    model: nn.Module, prompts: Tensor, max_new: int, eos: int, generator: torch.Generator, top_p: float = 1.0
) -> Drawn:
    """One response per row of prompts [B, P], at temperature 1.

    The report of a sampler with `top_p` below 1 is the distribution on the support that it drew from.
    """
    cache, step, live = None, prompts, torch.ones(len(prompts), dtype=torch.bool)
    ids, masks, laws, supports = [prompts], [], [], []
    for _ in range(max_new):
        out = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logp = torch.log_softmax(out.logits[:, -1].float(), -1)
        if top_p < 1:
            supports.append(nucleus(logp, top_p))
            logp = torch.log_softmax(logp.masked_fill(~supports[-1], EXCLUDED), -1)
        token = torch.multinomial(logp.exp(), 1, generator=generator)
        token = torch.where(live[:, None], token, torch.full_like(token, eos))
        ids.append(token)
        masks.append(live)
        laws.append(logp)
        live = live & (token[:, 0] != eos)
        step = token
        if not bool(live.any()):
            break
    support = torch.stack(supports, 1) if supports else None
    return Drawn(torch.cat(ids, 1), torch.stack(masks, 1), torch.stack(laws, 1), prompts.shape[1], support)


def nucleus(logp: Tensor, top_p: float) -> Tensor:
    """The smallest set of most probable tokens whose mass reaches `top_p`; logp and result [..., V]."""
    ordered, order = logp.exp().sort(-1, descending=True)
    kept = ordered.cumsum(-1) - ordered < top_p
    return torch.zeros_like(kept).scatter(-1, order, kept)


class Sampler:
    """A model with the sampler's numerics: the weights of a step, rounded or perturbed."""

    def __init__(self, model: nn.Module, condition: Condition, seed: int) -> None:
        self.model, self.condition = copy.deepcopy(model), condition
        generator = torch.Generator().manual_seed(seed)
        self._noise = {
            name: torch.randn(p.shape, generator=generator)
            for name, p in self._linear()
            if condition.noise > 0
        }

    def _linear(self) -> list[tuple[str, Tensor]]:
        layers = ((n, m) for n, m in self.model.named_modules() if isinstance(m, nn.Linear))
        return [(name, module.weight) for name, module in layers if "lm_head" not in name]

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Load the weights of `model`."""
        self.model.load_state_dict(model.state_dict())
        for name, weight in self._linear():
            if self.condition.noise > 0:
                weight.mul_(1 + self.condition.noise * self._noise[name])
            weight.copy_(rounded(weight, self.condition.weights))


def rounded(weight: Tensor, kind: str) -> Tensor:
    """The weight [out, in] after round-to-nearest quantisation and back."""
    if kind == "exact":
        return weight
    if kind == "bf16":
        return weight.to(torch.bfloat16).to(weight.dtype)
    if kind == "int4":
        groups = weight.reshape(weight.shape[0], -1, INT4_GROUP)
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7
        return (torch.round(groups / scale).clamp(-8, 7) * scale).reshape(weight.shape)
    limit = 127.0 if kind == "int8" else 448.0
    scale = weight.abs().amax(-1, keepdim=True).clamp_min(1e-12) / limit
    if kind == "int8":
        return torch.round(weight / scale) * scale
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale
