"""What runs in a reward worker: it loads the task and the reward, and scores one response after the other.

The socket carries one JSON object per line:

    pool -> worker      the settings of the task, once; then {"index": 17, "response": "..."}
    worker -> pool      {"problem": null, "isolation": "..."} once it is ready; then, for each response,
                        {"started": true} and {"value": 1.0} or {"error": "..."}
"""

from __future__ import annotations

import json
import resource
import signal
import socket
from io import BufferedRWPair
from typing import Any

import psutil

from leeway.config.task import TaskConfig
from leeway.errors import LeewayError
from leeway.process import die_with_parent
from leeway.rewards.isolation import isolate, plan_isolation
from leeway.rewards.load import Scorer, load_reward
from leeway.tasks.base import Task
from leeway.tasks.load import KINDS, load_task

SIGNALLED = 128
"""Exit status of a keeper whose worker was ended by a signal: this plus the signal's number."""
TOO_MUCH_MEMORY = (
    "the reward function raised MemoryError: it used more memory than task.reward_memory_mib allows"
)
MAX_ERROR = 500
"""Maximum length of the message of what a reward function raised."""


def dump_settings(config: TaskConfig) -> bytes:
    """The first line that a worker reads."""
    return json.dumps({"kind": config.kind, "settings": config.model_dump_json()}).encode() + b"\n"


def serve(fd: int, keeper: int) -> None:
    """Score what arrives at the socket `fd` until it is closed. `keeper`: process id of the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=fd) as channel, channel.makefile("rwb") as lines:
        first = json.loads(lines.readline())
        config = KINDS[first["kind"]].settings.model_validate_json(first["settings"])
        problem, isolation = None, ""
        try:
            plan = plan_isolation(config)
            isolation = plan.describe()
            isolate(plan)
            die_with_parent(keeper)  # a change of the user has undone it
            task = load_task(config)
            score = load_reward(config, task)
        except LeewayError as error:
            # Reported with every response: a worker that fails to start would be restarted forever.
            problem = str(error)
        if config.reward_memory_mib is not None:
            _limit_memory(config.reward_memory_mib)
        _send(lines, {"problem": problem, "isolation": isolation})
        for line in lines:
            _send(lines, {"started": True})
            request = json.loads(line)
            if problem is not None:
                _send(lines, {"error": problem})
            else:
                _send(lines, _answer(task, score, request["index"], request["response"]))


def _send(lines: BufferedRWPair[Any, Any], message: dict[str, Any]) -> None:
    lines.write(json.dumps(message).encode() + b"\n")
    lines.flush()


def _answer(task: Task, score: Scorer, index: int, response: str) -> dict[str, Any]:
    """The value of a response, or what went wrong. Nothing that a reward function raises leaves it."""
    try:
        return {"value": score(task.item(index), response)}
    except MemoryError:
        pass  # leave the block: the exception keeps alive what the function had allocated
    except BaseException as error:  # noqa: BLE001 (also SystemExit: the worker continues)
        return {"error": describe_error(error)}
    return {"error": TOO_MUCH_MEMORY}


def describe_error(error: BaseException) -> str:
    """What a reward function raised, in one line."""
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001 (the error is a stranger's)
        text = f"(its message cannot be shown: {type(second).__name__})"
    text = text.encode(errors="backslashreplace").decode()  # a lone surrogate cannot be sent on
    return f"the reward function raised {type(error).__name__}: {text}"[:MAX_ERROR]


def _limit_memory(mib: int) -> None:
    """Limit the address space to its current size plus `mib`: allocations beyond it raise MemoryError."""
    limit = psutil.Process().memory_info().vms + (mib << 20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
