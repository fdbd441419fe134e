"""`python -m leeway_host.preflight.reward`: the reward of one response, under the limits of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator

from leeway.config import RunConfig
from leeway.findings import Finding, run_trial
from leeway.rewards import check_reward
from leeway.rewards.isolation import Isolation, plan_isolation
from leeway.tasks import TaskError, load_task

CHECK, TASK = "reward", "task"


def try_reward(config: RunConfig, model: str) -> Iterator[Finding | str]:
    """Score the first item's own answer as a response. Raises TaskError when that fails."""
    yield "loading the task"
    try:
        task = load_task(config.task)
    except TaskError as exc:
        yield Finding("error", TASK, str(exc))
        return
    yield f"scoring one response with {config.task.reward}"
    started = time.monotonic()
    value = check_reward(config.task, task)
    seconds = time.monotonic() - started
    text = f"{config.task.reward}: item 0 answered with its own answer gives {value:g}"
    yield Finding("ok", CHECK, f"{text} ({seconds:.1f} s with the start of the process)")
    yield judge_isolation(plan_isolation(config.task))


def judge_isolation(isolation: Isolation) -> Finding:
    """Whether reward code can inspect the processes that it serves."""
    if isolation.user or isolation.landlock:
        return Finding("ok", CHECK, isolation.describe())
    advice = "use a kernel with Landlock (5.19 or newer), or run code that you do not trust in a sandbox"
    return Finding("warning", CHECK, isolation.describe(), advice)


if __name__ == "__main__":
    run_trial(CHECK, try_reward)
