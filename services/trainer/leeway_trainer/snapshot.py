"""theta_s, the weights that the samplers hold, in the trainer's own numerics.

pi_s is the policy of exactly the numbers that were published: publishing and refreshing the snapshot both
walk over `wire_tensors`, in model order, a few tensors at a time. theta_s holds those numbers in the
trainer's dtype; cast to the wire dtype they equal what samplers hold, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from leeway.weights.codec import count_not_finite
from leeway.weights.tensors import wire_words
from leeway_trainer.errors import NonFiniteError
from leeway_trainer.policy import LM_PREFIX, Policy, deepspeed_config, gathered, start_engine
from leeway_trainer.ranks import Ranks

if TYPE_CHECKING:
    from leeway.config import TrainerConfig
    from leeway_trainer.batch import MicroBatch
    from leeway_trainer.model import PolicyModel, PolicyOutput

GATHER_BYTES = 64 << 20
"""Maximum size of the parameters that ZeRO-3 gathers at a time while they are read."""


def wire_tensors(policy: Policy, dtype: torch.dtype, *, step: int) -> Iterator[tuple[str, Tensor]]:
    """(name of the Hugging Face checkpoint, tensor in wire type), in model order, tied weights once.

    Every rank must walk to the end (ZeRO-3 gathers); a tensor is valid until the next one. Raises
    NonFiniteError, naming the weight, instead of yielding one that is not finite.
    """
    for group in _grouped(policy.named_parameters(), GATHER_BYTES):
        with gathered([param for _, param in group], policy.config.zero_stage):
            for name, param in group:
                tensor = param.detach().to(dtype)
                if not _finite(tensor):
                    raise NonFiniteError(step, f"weight {name}", float(tensor.abs().max()))
                yield name, tensor


class Snapshot:
    """A frozen policy model for theta_s; sharded like the policy under ZeRO-3."""

    def __init__(self, model: PolicyModel, config: TrainerConfig, ranks: Ranks) -> None:
        model.requires_grad_(False)
        self.head = model.head
        self.zero_stage = config.zero_stage
        if self.zero_stage < 3:
            self.runner: nn.Module = model.to(ranks.device)
        else:
            self.runner, _ = start_engine(
                config, model=model, config=deepspeed_config(config, ranks.size, optimizer=False)
            )
        self.runner.eval()
        self._params = {
            name.removeprefix(LM_PREFIX): param
            for name, param in model.named_parameters()
            if name.startswith(LM_PREFIX)
        }

    @torch.no_grad()
    def score(self, batch: MicroBatch, with_hidden: bool = False) -> PolicyOutput:
        """log pi_s, float32, without gradient."""
        output: PolicyOutput = self.runner(batch, with_hidden=with_hidden)
        return output

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of theta_s; a tensor is valid until the next one. Every rank walks to the end."""
        for name, param in self._params.items():
            with gathered([param], self.zero_stage):
                yield name, param.data

    def equals(self, policy: Policy) -> bool:
        """Whether theta_s and theta are the same bit for bit, on all ranks. Every rank calls it.

        They are after `refresh` until theta is updated, unless the wire type is narrower than the trainer's.
        """
        pairs = ((self._params[name], param) for name, param in policy.named_parameters())
        return not policy.ranks.any(not all(torch.equal(_own(a), _own(b)) for a, b in pairs))

    def output_layer(self) -> AbstractContextManager[None]:
        """Inside, this rank holds the complete weights of `head`."""
        return gathered([p for p in (self.head.weight, self.head.bias) if p is not None], self.zero_stage)

    def beside(
        self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, tensor, the tensor of theta_s with that name, in wire type)."""
        for name, tensor in tensors:
            param = self._params[name]
            with gathered([param], self.zero_stage):
                yield name, tensor, param.detach().to(dtype)

    @torch.no_grad()
    def refresh(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all tensors into theta_s."""
        for name, tensor in tensors:
            param = self._params[name]
            with gathered([param], self.zero_stage, write=True):
                param.data.copy_(tensor)


def _own(param: nn.Parameter) -> Tensor:
    # What this rank holds of a parameter: its shard under ZeRO-3.
    own: Tensor = getattr(param, "ds_tensor", param.data)
    return own


def _finite(tensor: Tensor) -> bool:
    if tensor.device.type != "cpu":
        return bool(torch.isfinite(tensor).all())
    # torch takes a second for 135 M bfloat16 values, this 30 ms.
    return not count_not_finite(wire_words(tensor), str(tensor.dtype).removeprefix("torch."))


def _grouped(
    named: Iterable[tuple[str, nn.Parameter]], budget_bytes: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    group: list[tuple[str, nn.Parameter]] = []
    held = 0
    for name, param in named:
        size = getattr(param, "ds_numel", param.numel()) * param.element_size()
        if group and held + size > budget_bytes:
            yield group
            group, held = [], 0
        group.append((name, param))
        held += size
    if group:
        yield group
