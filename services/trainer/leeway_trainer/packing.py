"""The layout of a packed row: each prompt once, its responses behind it, no padding.

    row        p p p p a a a b b | q q a a b        two prompts with two responses each
    positions  0 1 2 3 4 5 6 4 5 | 0 1 2 3 2        a response continues at the prompt's length

A token attends to the prompt and to its own response, never to a sibling. Attention is computed in blocks,
two per prompt length, so that no prompt is padded: the prompts with themselves, and the responses with
[prompt, response].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Numbers of tokens that the model reads: of a prompt, and of each response (0 or more)."""

    prompt: int
    responses: tuple[int, ...]


@dataclass(frozen=True)
class AttentionBlock:
    """B rows of Q queries. A query attends to the K - Q keys before the first query, and to the queries up to
    itself. Shorter responses are padded with repeats of their last token, whose output is not used.

    queries: [B, Q], keys: [B, K], int64, indices into the row; the last Q keys are the queries.
    """

    queries: Tensor
    keys: Tensor

    def mask(self, window: int | None) -> Tensor | None:
        """[Q, K] bool: which keys a query sees, of the last `window` positions; None: plain causal, Q = K."""
        (_, queries), (_, keys) = self.queries.shape, self.keys.shape
        limited = window is not None and window < keys
        if queries == keys and not limited:
            return None
        device = self.queries.device
        position = torch.arange(keys - queries, keys, device=device)
        distance = position[:, None] - torch.arange(keys, device=device)
        mask = distance >= 0
        return mask & (distance < window) if window is not None and limited else mask


@dataclass(frozen=True)
class PackedLayout:
    """Where the tokens of a packed row are.

    position_ids: [T] int64. predicts: [N] int64, for each token of each response, in order, the index of the
    token before it. restore: [T] int64, for each token, its index in the concatenated outputs of `blocks`.
    """

    position_ids: Tensor
    predicts: Tensor
    blocks: tuple[AttentionBlock, ...]
    restore: Tensor

    @cached_property
    def prepared_mask(self) -> Tensor:
        """The attention mask for transformers: it builds none if it is given one with four dimensions."""
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.position_ids.device)


def packed_layout(groups: Sequence[Group], device: torch.device | str = "cpu") -> PackedLayout:
    """The layout of a row with `groups`, one after the other."""
    positions, predicts = [], []
    by_length: dict[int, tuple[list[int], list[tuple[int, int, int]]]] = {}
    at = 0
    for group in groups:
        prompts, responses = by_length.setdefault(group.prompt, ([], []))
        prompts.append(start := at)
        positions.append(np.arange(group.prompt))
        at += group.prompt
        for tokens in group.responses:
            positions.append(group.prompt + np.arange(tokens))
            predicts.append(np.r_[start + group.prompt - 1, at : at + tokens])
            if tokens:
                responses.append((start, at, tokens))
            at += tokens
    blocks, restore, done = [], np.zeros(at, dtype=np.int64), 0
    for length, (prompts, responses) in by_length.items():
        for queries, keys, own in _indices(length, prompts, responses):
            restore[queries[own]] = done + np.flatnonzero(own)
            done += queries.size
            blocks.append(AttentionBlock(_tensor(queries, device), _tensor(keys, device)))
    return PackedLayout(
        position_ids=_tensor(np.concatenate(positions), device),
        predicts=_tensor(np.concatenate(predicts), device),
        blocks=tuple(blocks),
        restore=_tensor(restore, device),
    )


def _indices(
    length: int, prompts: list[int], responses: list[tuple[int, int, int]]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    # (queries [B, Q], keys [B, K], which queries are not padding [B, Q]) of the blocks of one prompt length.
    prompt = np.array(prompts)[:, None] + np.arange(length)
    yield prompt, prompt, np.ones(prompt.shape, dtype=bool)
    if responses:
        start, first, tokens = np.array(responses).T[:, :, None]
        offset = np.arange(tokens.max())
        queries = first + np.minimum(offset, tokens - 1)
        yield queries, np.concatenate([start + np.arange(length), queries], axis=1), offset < tokens


def _tensor(array: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)
