"""From rollouts to padded micro-batches: which rank computes what, and its tensors.

plan_micro_batches   sequence lengths -> which sequences make which micro-batch on which rank (pure)
build_micro_batch    rollouts of one micro-batch -> tensors
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leeway.errors import LeewayError
from leeway.messages import Rollout
from leeway_trainer.head import TokenQuery


class BatchError(LeewayError):
    """A rollout that cannot be trained on: token ids outside the vocabulary or outside their support."""


@dataclass(frozen=True)
class MicroBatch:
    """B sequences padded on the right to length L, and their N response tokens, sequence after sequence.

    input_ids: [B, L] int64, prompt and response without the last token (no token follows it); padding is 0.
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

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return int(self.positions.numel())


@dataclass(frozen=True)
class PlannedMicroBatch:
    """Indices of sequences; `counts` as in MicroBatch."""

    sequences: tuple[int, ...]
    counts: bool = True


def plan_micro_batches(
    lengths: Sequence[int], budget_tokens: int, ranks: int
) -> list[list[PlannedMicroBatch]]:
    """Micro-batches by rank: each sequence once, the same number on every rank, of similar size at a time.

    Sequences fill micro-batches of at most `budget_tokens` padded tokens, longest first (a single sequence
    may be longer). Then the largest micro-batches are split, or repeats that do not count are added, until
    their number is a multiple of `ranks`.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    planned: list[list[int]] = []
    for i in order:
        # The first sequence of a micro-batch is its longest, so it sets the padded length.
        if planned and (len(planned[-1]) + 1) * lengths[planned[-1][0]] <= budget_tokens:
            planned[-1].append(i)
        else:
            planned.append([i])
    while len(planned) % ranks and any(len(p) > 1 for p in planned):
        at = max(range(len(planned)), key=lambda j: (len(planned[j]), -j))
        half = (len(planned[at]) + 1) // 2
        planned[at : at + 1] = [planned[at][:half], planned[at][half:]]
    result = [PlannedMicroBatch(tuple(p)) for p in planned]
    while len(result) % ranks:
        result.append(PlannedMicroBatch((order[-1],), counts=False))
    return [result[rank::ranks] for rank in range(ranks)]


def input_length(rollout: Rollout) -> int:
    """Number of tokens that the model reads: all but the last one."""
    return int(rollout.prompt_ids.size + rollout.response_ids.size - 1)


def build_micro_batch(
    rollouts: Sequence[Rollout],
    sequences: Sequence[int],
    *,
    temperature: float,
    vocabulary: int,
    device: torch.device | str = "cpu",
    counts: bool = True,
) -> MicroBatch:
    """Tensors of `rollouts`, whose indices in the batch are `sequences`.

    Raises BatchError, naming the ticket.
    """
    for rollout in rollouts:
        _check_ids(rollout, vocabulary)
    longest = max(input_length(r) for r in rollouts)
    input_ids = np.zeros((len(rollouts), longest), dtype=np.int64)
    positions, owner = [], []
    for row, rollout in enumerate(rollouts):
        ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])[:-1]
        input_ids[row, : ids.size] = ids
        first = rollout.prompt_ids.size - 1
        positions.append(row * longest + first + np.arange(rollout.response_ids.size))
        owner.append(np.full(rollout.response_ids.size, sequences[row]))
    head_ids, head_logp, head_mask = _padded_heads(rollouts)
    complete = np.concatenate([np.full(r.response_ids.size, r.header.support_complete) for r in rollouts])
    return MicroBatch(
        input_ids=_tensor(input_ids, device),
        positions=_tensor(np.concatenate(positions), device),
        query=TokenQuery(
            targets=_tensor(np.concatenate([r.response_ids for r in rollouts]).astype(np.int64), device),
            head_ids=_tensor(head_ids, device),
            head_mask=_tensor(head_mask, device),
            head_complete=_tensor(complete, device),
        ),
        logp_mu=_tensor(np.concatenate([r.logp for r in rollouts]).astype(np.float32), device),
        head_logp_mu=_tensor(head_logp, device),
        sequence=_tensor(np.concatenate(owner).astype(np.int64), device),
        temperature=temperature,
        counts=counts,
    )


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
