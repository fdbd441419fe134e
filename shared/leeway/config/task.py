"""The section `task`: what all kinds of tasks have in common. Each kind adds keys (leeway/tasks/kinds)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from leeway.config.base import Section
from leeway.config.choice import Choice

if TYPE_CHECKING:
    from leeway.registry import Registry
    from leeway.tasks.base import TaskKind


EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class TaskConfig(Section):
    """Where prompts come from and how a response is rewarded."""

    kind: str
    """Kind of the task; each kind has its own keys."""
    reward: str = "exact"
    """`exact`, `last_number`, `verifier` (the task's own), a reward from an installed package, or
    `module:function`, which gets its arguments by name (docs/extending.md#add-a-reward)."""
    reward_timeout_s: float = Field(default=5.0, gt=0)
    """Maximum time to score one response, after which the scoring process and all that it has started are
    killed."""
    reward_memory_mib: int | None = Field(default=1024, ge=16)
    """Maximum memory of a scoring process beyond what it uses once the task is loaded; null: no limit."""
    reward_workers: int = Field(default=1, ge=1)
    """Scoring processes per sampler."""
    reward_env: list[EnvName] = Field(default_factory=list)
    """Environment variables that the reward needs beyond the usual ones, for example OPENAI_API_KEY. Others,
    among them all passwords and tokens, are hidden from it."""
    reward_user: str | None = None
    """User that scoring processes run as if Leeway runs as root; null: `nobody`, if it can read Python, the
    task and the working directory, otherwise root (docs/permissions.md#what-reward-code-can-see)."""
    error_reward: float = 0.0
    """Reward of a response whose scoring crashed or timed out."""
    system_prompt: str | None = None
    """System message at the start of every chat."""
    prompt_suffix: str = ""
    """Text appended to every prompt."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the items are read from; none for items that are generated."""
        return ()


def _task_kinds() -> Registry[TaskKind]:
    from leeway.tasks.load import KINDS

    return KINDS


KIND_CHOICE = Choice(TaskConfig, "kind", "reasoning_gym", _task_kinds)
AnyTask = Annotated[TaskConfig, KIND_CHOICE]
"""Type of a field that holds the settings of any kind."""
