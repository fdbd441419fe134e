"""Reverse letters: `r:abcd=` -> `dcba`."""

from __future__ import annotations

import random
from typing import Literal

from pydantic import Field

from leeway.config import TaskConfig
from leeway.tasks import TaskItem, TaskKind


class ReverseConfig(TaskConfig):
    """Strings of letters to reverse."""

    kind: Literal["reverse"] = "reverse"
    length: int = Field(default=4, ge=1)
    """Letters per item."""
    size: int = Field(default=1024, ge=1)
    """Number of items."""


class ReverseTask:
    """Item i is a pure function of (length, i): every process generates the same items."""

    name = "reverse"

    def __init__(self, config: ReverseConfig) -> None:
        self.config = config

    def __len__(self) -> int:
        return self.config.size

    def item(self, index: int) -> TaskItem:
        rng = random.Random(f"reverse:{index}")
        letters = "".join(rng.choices("abcdefgh", k=self.config.length))
        return TaskItem(index, prompt=f"r:{letters}=", answer=letters[::-1])

    def verify(self, item: TaskItem, response: str) -> float:
        """What `task.reward: verifier` gives."""
        return float(response.strip() == item.answer)


TASK = TaskKind(settings=ReverseConfig, build=ReverseTask)
