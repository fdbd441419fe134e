"""Procedural data sets of reasoning-gym, by name and parameters."""

from __future__ import annotations

import difflib
from typing import Any

from leeway.tasks.base import TaskError, TaskItem, check_index


class ReasoningGymTask:
    """A reasoning-gym data set; its verifier is the data set's `score_answer`."""

    def __init__(self, name: str, params: dict[str, Any], size: int, seed: int) -> None:
        self._name = name
        self._dataset = _create(name, params, size, seed)
        self._size = size

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
        hint = f"did you mean {', '.join(close)}?" if close else "none is close"
        raise TaskError(
            f"task.name: reasoning-gym has no data set {name!r}; {hint} "
            f"({len(DATASETS)} exist, for example chain_sum, products, gcd)"
        )
    reserved = sorted({"size", "seed"} & set(params))
    if reserved:
        raise TaskError(f"task.params: give {', '.join(reserved)} as task.{reserved[0]}, not as a parameter")
    try:
        return create_dataset(name, size=size, seed=seed, **params)
    except (TypeError, ValueError, AssertionError) as error:
        raise TaskError(f"task.params: reasoning-gym's {name} does not take {params}: {error}") from error
