"""Which sequences make which micro-batch on which rank. Pure functions of lengths, the same on every rank.

plan_padded   rows of equal length, one per sequence
plan_packed   one row: each prompt once, with its responses behind it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedMicroBatch:
    """Indices of sequences.

    `counts` is False for a micro-batch that only gives its rank as many as the others have; its loss must
    be 0.
    """

    sequences: tuple[int, ...]
    counts: bool = True


Plan = list[list[PlannedMicroBatch]]
"""Micro-batches by rank: each sequence once, the same number on every rank, of similar size at a time."""


def plan_padded(lengths: Sequence[int], budget_tokens: int, ranks: int) -> Plan:
    """Micro-batches of at most `budget_tokens` padded tokens; a single sequence may be longer.

    Sequences fill micro-batches, longest first.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    parts: list[list[int]] = []
    for i in order:
        # The first sequence of a micro-batch is its longest, so it sets the padded length.
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= budget_tokens:
            parts[-1].append(i)
        else:
            parts.append([i])
    return _for_ranks(parts, ranks, len)


def plan_packed(
    prompts: Sequence[int],
    prompt_tokens: Sequence[int],
    response_tokens: Sequence[int],
    budget_tokens: int,
    ranks: int,
) -> Plan:
    """Micro-batches of at most `budget_tokens` computed tokens; a single sequence may be longer.

    prompts: [sequences] the prompt of each sequence, an index into prompt_tokens. response_tokens:
    [sequences] tokens that are read after the prompt. The responses to a prompt stay together unless they
    exceed the budget or are divided among ranks; each micro-batch then computes the prompt.
    """
    members: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(i)

    def tokens(part: Sequence[int]) -> int:
        return sum(prompt_tokens[p] for p in {prompts[i] for i in part}) + sum(
            response_tokens[i] for i in part
        )

    # Longest first: what is computed at the same time is then of similar length.
    for part in members.values():
        part.sort(key=lambda i: (-response_tokens[i], i))
    groups = sorted(members.values(), key=lambda part: (-tokens(part[:1]), part))
    parts: list[list[int]] = []
    used = budget_tokens
    for group in groups:
        if used + tokens(group) > budget_tokens:
            parts.append([])
            used = 0
        prompt = prompt_tokens[prompts[group[0]]]
        used += prompt
        for i in group:
            if parts[-1] and used + response_tokens[i] > budget_tokens:
                parts.append([])
                used = prompt
            parts[-1].append(i)
            used += response_tokens[i]
    parts.sort(key=tokens, reverse=True)
    return _for_ranks(parts, ranks, tokens)


def _for_ranks(parts: list[list[int]], ranks: int, size: Callable[[Sequence[int]], int]) -> Plan:
    # Until the number is a multiple of `ranks`, split the largest, or add repeats that do not count.
    while len(parts) % ranks and any(len(p) > 1 for p in parts):
        divisible = [j for j, part in enumerate(parts) if len(part) > 1]
        at = max(divisible, key=lambda j: (size(parts[j]), -j))
        half = (len(parts[at]) + 1) // 2
        parts[at : at + 1] = [parts[at][:half], parts[at][half:]]
    planned = [PlannedMicroBatch(tuple(p)) for p in parts]
    while len(planned) % ranks:
        planned.append(PlannedMicroBatch((parts[-1][-1],), counts=False))
    return [planned[rank::ranks] for rank in range(ranks)]
