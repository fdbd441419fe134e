"""Procedural data sets of reasoning-gym, by name and parameters."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import Field

from leeway.config.task import TaskConfig
from leeway.tasks.base import TaskError, TaskItem, TaskKind, check_index


class ReasoningGymConfig(TaskConfig):
    """A procedural data set of reasoning-gym."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: str = Field(min_length=1)
    """Name of the data set, for example `chain_sum`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the data set."""
    size: int = Field(default=1024, ge=1)
    """Number of items."""
    seed: int = Field(default=0, ge=0)
    """Seed of the items."""


class ReasoningGymTask:
    """A reasoning-gym data set; its verifier is the data set's `score_answer`."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        self._name = config.name
        self._dataset = _create(config.name, config.params, config.size, config.seed)
        self._size = config.size

    @property
    def name(self) -> str:
        return self._name

    def __len__(self) -> int:
        return self._size

    def item(self, index: int) -> TaskItem:
        check_index(self, index)
        entry = self._dataset[index]
        answer = entry["answer"]
        return TaskItem(
            index=index,
            prompt=entry["question"],
            answer="" if answer is None else str(answer),
            metadata=dict(entry["metadata"]),
        )

    def verify(self, item: TaskItem, response: str) -> float:
        entry = {"question": item.prompt, "answer": item.answer, "metadata": item.metadata}
        return float(self._dataset.score_answer(answer=response.strip(), entry=entry))


def _create(name: str, params: dict[str, Any], size: int, seed: int) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}?" if close else "no similar name exists"
        raise TaskError(
            f"task.name: reasoning-gym has no data set {name!r}; {hint} "
            f"({len(DATASETS)} exist, for example chain_sum, products, gcd)"
        )
    reserved = sorted({"size", "seed"} & set(params))
    if reserved:
        raise TaskError(f"task.params: set {', '.join(reserved)} as task.{reserved[0]}, not as a parameter")
    try:
        return create_dataset(name, size=size, seed=seed, **params)
    except (TypeError, ValueError, AssertionError) as error:
        raise TaskError(f"task.params: reasoning-gym's {name} does not accept {params}: {error}") from error


TASK = TaskKind(ReasoningGymConfig, ReasoningGymTask)
