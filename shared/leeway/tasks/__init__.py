"""Tasks: where prompts come from. Each kind is a module in `leeway.tasks.kinds`.

task = load_task(config.task)            # reasoning-gym data set, JSONL file, the built-in digits, ...
item = task.item(17)                     # a pure function of (settings, index)
ids = encode_prompt(tokenizer, item, config.task)
"""

from leeway.tasks.base import Task, TaskError, TaskItem, TaskKind
from leeway.tasks.load import KINDS, load_task, task_config
from leeway.tasks.prompts import build_messages, encode_prompt

__all__ = [
    "KINDS",
    "Task",
    "TaskError",
    "TaskItem",
    "TaskKind",
    "build_messages",
    "encode_prompt",
    "load_task",
    "task_config",
]
