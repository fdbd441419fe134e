"""The section `task`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from leeway.config.base import Section


class TaskConfig(Section):
    """Where prompts come from and how a response is rewarded."""

    kind: Literal["reasoning_gym", "jsonl", "digits"] = "reasoning_gym"
    """`reasoning_gym`: a procedural data set by name; `jsonl`: a file; `digits`: sort digits, built in."""
    name: str | None = None
    """The data set of reasoning-gym, for example `chain_sum`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the data set."""
    path: str | None = None
    """The JSONL file, one object a line."""
    prompt_field: str = "prompt"
    """Field of a JSONL object that holds the prompt (text, or a list of chat messages)."""
    answer_field: str = "answer"
    """Field of a JSONL object that holds the answer."""
    size: int = Field(default=1024, ge=1)
    """Number of items of a procedural data set."""
    seed: int = Field(default=0, ge=0)
    """Seed of a procedural data set."""
    reward: str = "exact"
    """`exact`, `last_number`, `verifier` (the task's own) or `module:function`."""
    reward_timeout_s: float = Field(default=5.0, gt=0)
    """Time limit of one scoring, after which its process is killed."""
    reward_memory_mib: int | None = Field(default=1024, ge=16)
    """Memory that a scoring process may take beyond what it has when the task is loaded; null: no limit."""
    reward_workers: int = Field(default=1, ge=1)
    """Scoring processes beside each sampler."""
    error_reward: float = 0.0
    """Reward of a response whose scoring crashed or ran out of time."""
    system_prompt: str | None = None
    """First message of the chat template."""
    prompt_suffix: str = ""
    """Text put after every prompt."""

    @model_validator(mode="after")
    def _needs(self) -> TaskConfig:
        if self.kind == "reasoning_gym" and not self.name:
            raise ValueError("task.name is required for kind reasoning_gym, for example chain_sum")
        if self.kind == "jsonl" and not self.path:
            raise ValueError("task.path is required for kind jsonl")
        return self
