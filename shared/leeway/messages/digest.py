"""The digest of a response, by which the trainer recognises what the engine drew."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray


def draw_digest(response_ids: NDArray[Any], logp: NDArray[Any]) -> str:
    """xxh3 (16 hex digits) of drawn tokens [T] and their log-probabilities [T]."""
    state = xxhash.xxh3_64()
    state.update(np.ascontiguousarray(response_ids, dtype="<i4").tobytes())
    state.update(np.ascontiguousarray(logp, dtype="<f4").tobytes())
    return state.hexdigest()
