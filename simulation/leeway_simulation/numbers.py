"""What an engine draws and what a step of the optimiser changes, as instant pure functions.

    tokens of a response   of its ticket's seed and the weights in the engine
    theta after a step     of theta and the tokens of the batch

So every rollout shows which weights it was drawn from, and the trainer can tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

VALUES = 256
"""Numbers in each of the two weights."""
LARGEST = 200
"""Whole numbers up to here are exact in bfloat16."""
RESPONSE_TOKENS = 3


def weights_name(parts: Iterable[bytes]) -> bytes:
    """Identifies weights by the bytes of their tensors on the wire."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return state.digest()


def draw(seed: int, weights: bytes) -> NDArray[np.int32]:
    """The tokens of the response to a ticket with `seed` under the weights of that name."""
    found = hashlib.blake2b(f"{seed}".encode() + weights, digest_size=4 * RESPONSE_TOKENS).digest()
    return (np.frombuffer(found, dtype="<u4") % 1000).astype(np.int32)


def place_of_change(tokens: Iterable[bytes]) -> int:
    """Which of the numbers of theta a step changes."""
    return int.from_bytes(weights_name(tokens)[:4], "little") % (2 * VALUES)


def ess_after(seed: int, step: int) -> float:
    """The effective sample size that a step reports; about one in four asks for a resync."""
    return hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=1).digest()[0] / 128
