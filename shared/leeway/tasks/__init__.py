"""Tasks: where prompts come from and how a response is rewarded.

task = load_task(config.task)            # reasoning-gym data set, JSONL file or the built-in digits
item = task.item(17)                     # a pure function of (config, index)
ids = encode_prompt(tokenizer, item, config.task)
pool = RewardPool(config.task)           # scoring in killable subprocesses
result = await pool.score(17, "the answer is 12")
"""

from leeway.tasks.base import Task, TaskError, TaskItem
from leeway.tasks.load import load_task
from leeway.tasks.prompts import build_messages, encode_prompt
from leeway.tasks.rewards import RewardPool, RewardResult

__all__ = [
    "RewardPool",
    "RewardResult",
    "Task",
    "TaskError",
    "TaskItem",
    "build_messages",
    "encode_prompt",
    "load_task",
]
