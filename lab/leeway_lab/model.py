"""The tiny model: log-probabilities, drawing, and the sampler's numerics."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leeway.config import ModelConfig, TaskConfig
from leeway.models import prepare_model
from leeway.tasks import encode_prompt, load_task
from leeway_lab.spec import Condition, ModelSpec

INT4_GROUP = 32
MAX_LENGTH = 48


@dataclass(frozen=True)
class Drawn:
    """B responses of at most T tokens to prompts of P tokens.

    ids [B, P + T]; mask [B, T] true up to and with the end token; logp [B, T, V] of the distribution that
    each token was drawn from.
    """

    ids: Tensor
    mask: Tensor
    logp: Tensor
    prompt: int

    @property
    def responses(self) -> Tensor:
        """[B, T]"""
        return self.ids[:, self.prompt :]


class Task:
    """Digits to sort, as token ids of one length; `reward` is the share of right positions."""

    def __init__(self, spec: ModelSpec, tokenizer: Any, size: int = 4096) -> None:
        config = task_config(spec, size)
        self._task = load_task(config)
        self._tokenizer = tokenizer
        self.size = size
        self.max_new = spec.length + 2
        self.eos = int(tokenizer.eos_token_id)
        items = [self._task.item(i) for i in range(size)]
        self.prompts = torch.tensor([encode_prompt(tokenizer, item, config) for item in items])
        """[size, P]"""

    def rewards(self, items: list[int], drawn: Drawn) -> Tensor:
        """[B] float64 in [0, 1]."""
        found = []
        for item, row, mask in zip(items, drawn.responses.tolist(), drawn.mask.tolist(), strict=True):
            kept = [t for t, used in zip(row, mask, strict=True) if used and t != self.eos]
            found.append(self._task.verify(self._task.item(item), self._tokenizer.decode(kept)))
        return torch.tensor(found, dtype=torch.float64)


def task_config(spec: ModelSpec, size: int = 4096) -> TaskConfig:
    """The task as the product configures it."""
    return TaskConfig(kind="digits", params={"length": spec.length}, reward="verifier", size=size)


def load_base(spec: ModelSpec) -> tuple[nn.Module, Any]:
    """theta_0 in float32 and its tokenizer; made and warmed up on first use, then cached."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    params = {
        "hidden": spec.hidden,
        "layers": spec.layers,
        "heads": spec.heads,
        "vocab": 104,
        "target_accuracy": spec.target_accuracy,
    }
    config = ModelConfig(name="tiny", max_length=MAX_LENGTH, params=params)
    directory = prepare_model(config, task=task_config(spec), seed=0)
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(str(directory))


def response_logp(model: nn.Module, ids: Tensor, prompt: int) -> Tensor:
    """[B, T, V] log-probabilities at the positions of the response; ids [B, P + T]."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.log_softmax(logits[:, prompt - 1 :].float(), -1)


@torch.no_grad()
def draw(model: nn.Module, prompts: Tensor, max_new: int, eos: int, generator: torch.Generator) -> Drawn:
    """One response per row of prompts [B, P], at temperature 1 from the whole vocabulary."""
    cache, step, live = None, prompts, torch.ones(len(prompts), dtype=torch.bool)
    ids, masks, laws = [prompts], [], []
    for _ in range(max_new):
        out = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logp = torch.log_softmax(out.logits[:, -1].float(), -1)
        token = torch.multinomial(logp.exp(), 1, generator=generator)
        token = torch.where(live[:, None], token, torch.full_like(token, eos))
        ids.append(token)
        masks.append(live)
        laws.append(logp)
        live = live & (token[:, 0] != eos)
        step = token
        if not bool(live.any()):
            break
    return Drawn(torch.cat(ids, 1), torch.stack(masks, 1), torch.stack(laws, 1), prompts.shape[1])


class Sampler:
    """A model with the sampler's numerics: the weights of some step, rounded or disturbed."""

    def __init__(self, model: nn.Module, condition: Condition, seed: int) -> None:
        self.model, self.condition = copy.deepcopy(model), condition
        generator = torch.Generator().manual_seed(seed)
        self._noise = {
            name: torch.randn(p.shape, generator=generator)
            for name, p in self._linear()
            if condition.noise > 0
        }

    def _linear(self) -> list[tuple[str, nn.Parameter]]:
        layers = ((n, m) for n, m in self.model.named_modules() if isinstance(m, nn.Linear))
        return [(name, module.weight) for name, module in layers if "lm_head" not in name]

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Take the weights of `model`."""
        self.model.load_state_dict(model.state_dict())
        for name, weight in self._linear():
            if self.condition.noise > 0:
                weight.mul_(1 + self.condition.noise * self._noise[name])
            weight.copy_(rounded(weight, self.condition.weights))


def rounded(weight: Tensor, kind: str) -> Tensor:
    """The weight [out, in] after round-to-nearest quantisation and back."""
    if kind == "exact":
        return weight
    if kind == "int4":
        groups = weight.reshape(weight.shape[0], -1, INT4_GROUP)
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7
        return (torch.round(groups / scale).clamp(-8, 7) * scale).reshape(weight.shape)
    limit = 127.0 if kind == "int8" else 448.0
    scale = weight.abs().amax(-1, keepdim=True).clamp_min(1e-12) / limit
    if kind == "int8":
        return torch.round(weight / scale) * scale
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale
