"""Infrastructure faults of experiment 9: what happens to a batch between the sampler and the trainer.

Leeway removes each of them; here they are made on purpose, one at a time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from leeway_lab.model import Drawn

TOP_P = 0.7
OVERSAMPLING = 2
"""Ratio of requested to used responses when a batch takes those that finish first."""
RESPELLED = 0.05
"""Share of digits that are returned as different token ids of the same text."""
LEAST_REWARD = 0.5
"""The filter drops rollouts with a lower reward."""


def first_finished(drawn: Drawn, group_size: int) -> Tensor:
    """[B / OVERSAMPLING] rows in order: of every group the `group_size` shortest, earlier ones first."""
    lengths = drawn.mask.sum(1).view(-1, OVERSAMPLING * group_size)
    chosen = lengths.argsort(dim=1, stable=True)[:, :group_size].sort(dim=1).values
    starts = torch.arange(len(lengths))[:, None] * lengths.shape[1]
    return (chosen + starts).flatten()


def take(drawn: Drawn, rows: Tensor) -> Drawn:
    """Some of the responses."""
    support = None if drawn.support is None else drawn.support[rows]
    return replace(drawn, ids=drawn.ids[rows], mask=drawn.mask[rows], logp=drawn.logp[rows], support=support)


def respelled(drawn: Drawn, digits: Tensor, others: Tensor, generator: torch.Generator) -> Drawn:
    """Some of the `digits` [10] replaced by `others` [10], as if their text had been tokenised differently.

    The tiny tokenizer has one spelling for everything, so its spare ids stand in for a second one. What the
    sampler reported stays with the position, as it does when only text travels.
    """
    ids = drawn.ids.clone()
    response = ids[:, drawn.prompt :]
    hit = torch.rand(response.shape, generator=generator) < RESPELLED
    for old, new in zip(digits.tolist(), others.tolist(), strict=True):
        response[hit & drawn.mask & (response == old)] = new
    return replace(drawn, ids=ids)
