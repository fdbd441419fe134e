"""Reward of the GPU examples: +1 for a correct expression between <answer> and </answer>, -1 otherwise."""

from __future__ import annotations

from typing import Any

from reasoning_gym.factory import create_dataset
from reasoning_gym.utils import extract_answer

_countdown = create_dataset("countdown", size=1)


def reward(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """1 if the expression uses each number once and gives the target; `answer` is one solution."""
    expression = extract_answer(response)
    right = expression is not None and _countdown.score_answer(expression, {"metadata": metadata}) == 1.0
    return 1.0 if right else -1.0
