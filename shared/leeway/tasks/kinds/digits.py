"""Sort digits: `s:3142=` -> `1234`. Small enough for a model of half a million parameters."""

from __future__ import annotations

import random
from typing import Any, Literal

from pydantic import Field

from leeway.config.task import TaskConfig
from leeway.tasks.base import TaskError, TaskItem, TaskKind, check_index

MAX_LENGTH = 64
DEFAULTS = {"min_length": 5, "max_length": 5}


class DigitsConfig(TaskConfig):
    """Strings of digits to sort, built in."""

    kind: Literal["digits"] = "digits"
    params: dict[str, Any] = Field(default_factory=dict)
    """`length`, or `min_length` and `max_length` (lengths are then drawn uniformly); default 5."""
    size: int = Field(default=1024, ge=1)
    """Number of items."""
    seed: int = Field(default=0, ge=0)
    """Seed of the items."""


class DigitsTask:
    """`size` strings of digits to sort. Item i is a pure function of (seed, i, lengths)."""

    def __init__(self, config: DigitsConfig) -> None:
        self._min, self._max = _read_lengths(config.params)
        self._size = config.size
        self._seed = config.seed

    @property
    def name(self) -> str:
        return "digits"

    def __len__(self) -> int:
        return self._size

    def item(self, index: int) -> TaskItem:
        check_index(self, index)
        rng = random.Random(f"leeway-digits:{self._seed}:{index}")
        digits = [rng.choice("0123456789") for _ in range(rng.randint(self._min, self._max))]
        return TaskItem(index=index, prompt=f"s:{''.join(digits)}=", answer="".join(sorted(digits)))

    def verify(self, item: TaskItem, response: str) -> float:
        """Share of correct positions; missing and surplus characters count as wrong."""
        got = response.strip()
        right = sum(a == b for a, b in zip(got, item.answer, strict=False))
        return right / max(len(got), len(item.answer))


def _read_lengths(params: dict[str, Any]) -> tuple[int, int]:
    unknown = sorted(set(params) - {"length", "min_length", "max_length"})
    if unknown:
        raise TaskError(
            f"task.params: unknown parameter {', '.join(unknown)} for kind digits; expected length, or "
            "min_length and max_length"
        )
    if "length" in params and len(params) > 1:
        raise TaskError("task.params: give either length, or min_length and max_length, not both")
    if "length" in params:
        values = {"min_length": params["length"], "max_length": params["length"]}
    else:
        values = {**DEFAULTS, **params}
    low, high = values["min_length"], values["max_length"]
    if not (type(low) is type(high) is int and 1 <= low <= high <= MAX_LENGTH):
        raise TaskError(
            f"task.params: lengths {low!r} to {high!r} for kind digits; expected integers with "
            f"1 <= min_length <= max_length <= {MAX_LENGTH}"
        )
    return low, high


TASK = TaskKind(DigitsConfig, DigitsTask)
