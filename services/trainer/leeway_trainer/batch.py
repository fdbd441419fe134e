"""From rollouts to micro-batches: the tensors of what a rank computes.

A micro-batch is a packed row, in which the responses to a prompt share its tokens (`leeway_trainer.packing`).
For models that cannot share prompts (`leeway_trainer.sharing`), it is a padded batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from leeway.errors import LeewayError
from leeway.messages import Rollout
from leeway_trainer.head import TokenQuery
from leeway_trainer.packing import Group, PackedLayout, packed_layout
from leeway_trainer.plan import Plan, plan_packed, plan_padded


class BatchError(LeewayError):
    """A rollout that cannot be trained on: token ids outside the vocabulary or outside their support."""


@dataclass(frozen=True)
class MicroBatch:
    """What the model reads, and the N response tokens of the sequences, sequence after sequence.

    input_ids: [B, L] int64, prompts and responses without the last token (no token follows it). With
    `layout`: a packed row, B = 1. Without: B sequences, padded on the right with 0.
    positions: [N] int64, index into the flattened [B * L] hidden states that predicts the response token.
    query: which log-probabilities to compute there; K is the largest head of the micro-batch, at least 1.
    logp_mu: [N] float32, log mu of the drawn tokens. head_logp_mu: [N, K] float32, -inf at padding.
    sequence: [N] int64, index of the response in the batch (slot order).
    counts: False for a micro-batch that only gives this rank as many as the others have; its loss must be 0.
    """

    input_ids: Tensor
    positions: Tensor
    query: TokenQuery
    logp_mu: Tensor
    head_logp_mu: Tensor
    sequence: Tensor
    temperature: float
    counts: bool = True
    layout: PackedLayout | None = None

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return int(self.positions.numel())


def rank_micro_batches(
    rollouts: Sequence[Rollout],
    *,
    budget_tokens: int,
    temperature: float,
    vocabulary: int,
    packed: bool,
    rank: int = 0,
    ranks: int = 1,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """The micro-batches of one rank; `rollouts` is the whole batch, the same on every rank.

    Raises BatchError, naming the ticket.
    """
    plan = _plan(rollouts, budget_tokens, ranks, packed)
    return [
        build_micro_batch(
            [rollouts[i] for i in planned.sequences],
            planned.sequences,
            temperature=temperature,
            vocabulary=vocabulary,
            device=device,
            counts=planned.counts,
            packed=packed,
        )
        for planned in plan[rank]
    ]


def _plan(rollouts: Sequence[Rollout], budget_tokens: int, ranks: int, packed: bool) -> Plan:
    if not packed:
        lengths = [int(r.prompt_ids.size + r.response_ids.size - 1) for r in rollouts]
        return plan_padded(lengths, budget_tokens, ranks)
    prompts = same_prompt(rollouts)
    prompt_tokens = {p: int(r.prompt_ids.size) for p, r in zip(prompts, rollouts, strict=True)}
    return plan_packed(
        prompts,
        [prompt_tokens[p] for p in range(len(prompt_tokens))],
        [int(r.response_ids.size - 1) for r in rollouts],
        budget_tokens,
        ranks,
    )


def same_prompt(rollouts: Sequence[Rollout]) -> list[int]:
    """For each rollout the index of its prompt among the distinct ones, in order of appearance."""
    index: dict[bytes, int] = {}
    return [index.setdefault(r.prompt_ids.tobytes(), len(index)) for r in rollouts]


def build_micro_batch(
    rollouts: Sequence[Rollout],
    sequences: Sequence[int],
    *,
    temperature: float,
    vocabulary: int,
    packed: bool,
    device: torch.device | str = "cpu",
    counts: bool = True,
) -> MicroBatch:
    """Tensors of `rollouts`, whose indices in the batch are `sequences`.

    Rollouts share a prompt in a packed row if they follow each other. Raises BatchError, naming the ticket.
    """
    for rollout in rollouts:
        _check_ids(rollout, vocabulary)
    layout = None
    if packed:
        input_ids, layout = _packed_row(rollouts, device)
        positions = layout.predicts
    else:
        input_ids, padded_positions = _padded_rows(rollouts)
        positions = _tensor(padded_positions, device)
    head_ids, head_logp, head_mask = _padded_heads(rollouts)
    sizes = [r.response_ids.size for r in rollouts]
    complete = np.repeat([r.header.support_complete for r in rollouts], sizes)
    return MicroBatch(
        input_ids=_tensor(input_ids, device),
        positions=positions,
        query=TokenQuery(
            targets=_tensor(np.concatenate([r.response_ids for r in rollouts]).astype(np.int64), device),
            head_ids=_tensor(head_ids, device),
            head_mask=_tensor(head_mask, device),
            head_complete=_tensor(complete, device),
        ),
        logp_mu=_tensor(np.concatenate([r.logp for r in rollouts]).astype(np.float32), device),
        head_logp_mu=_tensor(head_logp, device),
        sequence=_tensor(np.repeat(np.asarray(sequences, dtype=np.int64), sizes), device),
        temperature=temperature,
        counts=counts,
        layout=layout,
    )


def _packed_row(rollouts: Sequence[Rollout], device: torch.device | str) -> tuple[np.ndarray, PackedLayout]:
    # ([1, T], layout)
    groups, row = [], []
    prompts = same_prompt(rollouts)
    for _, members in groupby(zip(prompts, rollouts, strict=True), key=itemgetter(0)):
        group = [rollout for _, rollout in members]
        row += [group[0].prompt_ids, *(r.response_ids[:-1] for r in group)]
        groups.append(
            Group(int(group[0].prompt_ids.size), tuple(int(r.response_ids.size) - 1 for r in group))
        )
    return np.concatenate(row).astype(np.int64)[None], packed_layout(groups, device)


def _padded_rows(rollouts: Sequence[Rollout]) -> tuple[np.ndarray, np.ndarray]:
    # ([B, L], [N] indices into B * L)
    longest = max(r.prompt_ids.size + r.response_ids.size - 1 for r in rollouts)
    input_ids = np.zeros((len(rollouts), longest), dtype=np.int64)
    positions = []
    for row, rollout in enumerate(rollouts):
        ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])[:-1]
        input_ids[row, : ids.size] = ids
        positions.append(row * longest + rollout.prompt_ids.size - 1 + np.arange(rollout.response_ids.size))
    return input_ids, np.concatenate(positions)


def _padded_heads(rollouts: Sequence[Rollout]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # Ragged heads to [N, K]: entry j of a position goes to column j.
    sizes = np.concatenate([np.diff(r.head_offsets) for r in rollouts]).astype(np.int64)
    width = max(1, int(sizes.max()))
    mask = np.arange(width)[None, :] < sizes[:, None]
    ids = np.zeros(mask.shape, dtype=np.int64)
    logp = np.full(mask.shape, -np.inf, dtype=np.float32)
    ids[mask] = np.concatenate([r.head_ids for r in rollouts])
    logp[mask] = np.concatenate([r.head_logp for r in rollouts])
    return ids, logp, mask


def _check_ids(rollout: Rollout, vocabulary: int) -> None:
    name = f"rollout {rollout.header.ticket_id}"
    for array_name in ("prompt_ids", "response_ids", "head_ids"):
        array = getattr(rollout, array_name)
        if array.size and int(array.max()) >= vocabulary:
            raise BatchError(
                f"{name}: {array_name} holds token {int(array.max())}, expected less than the vocabulary of "
                f"{vocabulary}; sampler and trainer run different models"
            )
    if rollout.header.support_complete:
        owner = np.repeat(np.arange(rollout.response_ids.size), np.diff(rollout.head_offsets))
        drawn = rollout.head_ids == rollout.response_ids[owner]
        found = np.bincount(owner[drawn], minlength=rollout.response_ids.size) > 0
        if not found.all():
            at = int(np.argmin(found))
            raise BatchError(f"{name}: token {at} is outside the support that was reported as complete")


def _tensor(array: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
