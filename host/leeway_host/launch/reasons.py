"""Why a process ended, from the end of its log: the one line that a user needs.

log -> lines without noise -> candidates (exceptions, error records, fatal messages) -> the last one that is
not merely the echo of another process's failure.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

MAX_MESSAGE_LINES = 6
CONTEXT_LINES = 5


@dataclass(frozen=True)
class Reason:
    """Why a run ended: the process that caused it, its error, and the command or change that comes next."""

    process: str
    cause: str
    next: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


NOISE = (
    # Leak reports of native libraries at exit; they follow every exception and say nothing about it.
    r"nanobind: (leaked|this is likely|.*reference leak)",
    r" *- (leaked (type|instance|function|keep_alive)|\.\.\. skipped remainder)",
    r"See https://nanobind\.",
    r"tcmalloc: ",
    r".*resource_tracker: ",
    r"\s*warnings\.warn\(",
    # Banners and progress of DeepSpeed, gloo, NCCL, torch's C++ loggers.
    r"\[[\d :,.-]+\] \[(INFO|WARNING|DEBUG)\] \[",
    r"\[Gloo\] ",
    r"(\[rank\d+\]:)?\[[IW]\d{3,4} ?[\d:.]* ?[\d:.]*.*\]",
    r"[IW]\d{4} \d\d:\d\d:\d\d",
    r".*destroy_process_group\(\) was not called",
    r"(begin|end) bf16_ ?optimizer|(before|after) initializing group|M?A [\d.]+ GB|CPU Virtual Memory:",
    r"Triton is installed, but|Loading safetensors checkpoint shards",
    r".*(INFO|WARNING|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[",
    # What faulthandler and multiprocessing add to an error.
    r"(Current t|T)hread 0x|  File \"|Extension modules: |Process \S+:$",
    # Closing lines of torchrun.
    r"[=+-]+[=-]{8,}",
    r"\s*(Root Cause|Failures|\[\d+\]|time|host|rank|exitcode|error_file|traceback) *(\(.*?\))? *:",
    r"\s*<NO_OTHER_FAILURES>",
    r"\s*\S+ FAILED$",
    r"\s*$",
)
"""Lines that are never a reason, nor context."""
NOISE_LINE = re.compile("|".join(f"(?:{pattern})" for pattern in NOISE))

ECHOES = re.compile(
    r"Engine core initialization failed|EngineDeadError|EngineCore encountered an issue|ChildFailedError"
    r"|Connection closed by peer|ExceptionGroup: |Broken ?ProcessPool|CancelledError"
    r"|KeyboardInterrupt|SystemExit|worker process.* died unexpectedly|Exiting PID"
)
"""Errors that only report the failure of another process or thread: an earlier line has the reason."""

PREFIX = re.compile(
    r"\x1b\[[\d;]*m"  # colours
    r"|^\((?:\w+[ _]?)+pid=\d+\) "  # vLLM's processes
    r"|^\[rank\d+\]: "  # torch's excepthook
    r"|^\s*[|+] ?(?=\S|  )"  # exception groups
)
VLLM_ERROR = re.compile(r"^ERROR \d\d-\d\d \d\d:\d\d:\d\d \[[\w./]+:\d+\] ?")
RECORD = re.compile(r"^\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+) (.*)$")
"""A line of leeway.telemetry.logs.TextFormatter."""
FATAL = re.compile(
    r"^(?:Fatal Python error: |terminate called after|.*\bwhat\(\): |Segmentation fault|.*: error: "
    r"|\S*python\S*: No module named )"
)
TRACEBACK = re.compile(r"(Exception Group )?Traceback \(most recent call last\):")
MODULE = re.compile(r"^(?:\w+\.)+(?=[A-Z]\w*(?::|$))")
"""The module in front of an exception's name."""
BETWEEN = re.compile(r"^(During handling of the above|The above exception was)")
WARNING = re.compile(r"\S+:\d+: \w*Warning: ")
"""Of Python's warnings module; the next line is the source."""
IGNORED = re.compile(r"^Exception ignored in|^Error in atexit")


@dataclass(frozen=True)
class Line:
    """A line of a log without noise. `error`: the first line of an error, with its message's other lines."""

    text: str
    error: str | None = None
    frame: bool = False
    """Part of a traceback."""


def find_cause(log: str) -> str | None:
    """The error that ended the process whose log ends like this; None if it shows none."""
    errors = [line.error for line in read_lines(log) if line.error is not None]
    direct = [error for error in errors if not ECHOES.search(error)]
    found = direct or errors
    return found[-1] if found else None


def last_line(log: str) -> str | None:
    """The last line that is neither noise nor part of a traceback."""
    told = [line.text for line in read_lines(log) if not line.frame]
    return told[-1] if told else None


def context(log: str, count: int = CONTEXT_LINES) -> list[str]:
    """The last `count` lines, without noise, tracebacks and repetitions."""
    told = (line.text for line in read_lines(log) if not line.frame)
    return [text for text, _ in groupby(told)][-count:]


def read_lines(log: str) -> Iterator[Line]:
    """The lines of `log` without noise; errors with their whole message."""
    lines = [_bare(line) for line in log.splitlines()]
    index, in_traceback, ignored = 0, False, False
    while index < len(lines):
        text = lines[index]
        index += 1
        if IGNORED.match(text):
            ignored = True
        elif TRACEBACK.match(text):
            in_traceback = True
            yield Line(text, frame=True)
        elif in_traceback and (not text or text[0].isspace()):
            yield Line(text, frame=True)
        elif in_traceback and NOISE_LINE.match(text):
            continue
        elif WARNING.match(text):
            index += index < len(lines) and lines[index].startswith("  ")
        elif in_traceback or _is_error(text):
            message = [_message(text), *_continuation(lines[index:])]
            index += len(message) - 1
            if not (in_traceback and ignored):
                yield Line(message[0], error="\n".join(message))
            ignored = ignored and not in_traceback
            in_traceback = False
        elif NOISE_LINE.match(text) or BETWEEN.match(text):
            continue
        else:
            yield Line(text)


def _bare(line: str) -> str:
    """Without what processes put before a line, and without vLLM's header of an error record."""
    before = None
    while before != line:
        before, line = line, PREFIX.sub("", line, count=1)
    return VLLM_ERROR.sub("", line).rstrip()


def _is_error(text: str) -> bool:
    record = RECORD.match(text)
    if record:
        return record[1] in ("ERROR", "CRITICAL")
    return bool(FATAL.match(text)) or _json_error(text) is not None


def _message(text: str) -> str:
    record = RECORD.match(text)
    return record[3] if record else _json_error(text) or MODULE.sub("", text.strip())


def _json_error(text: str) -> str | None:
    """The message of an error record of leeway.telemetry.logs.JsonFormatter."""
    if not text.startswith('{"time"'):
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    if record.get("level") not in ("ERROR", "CRITICAL"):
        return None
    trace = str(record.get("exception") or "").splitlines()
    return trace[-1] if trace else str(record.get("message"))


def _continuation(lines: Sequence[str]) -> Iterator[str]:
    """The other lines of a message of several lines."""
    for line in lines[: MAX_MESSAGE_LINES - 1]:
        known = RECORD.match(line) or NOISE_LINE.match(line) or BETWEEN.match(line) or FATAL.match(line)
        if known or TRACEBACK.match(line) or line.startswith('{"time"') or IGNORED.match(line):
            return
        yield line.rstrip()


def describe_exit(code: int) -> str:
    """`exit code 3`, or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    known = -code in signal.Signals.__members__.values()
    return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def explain_exit(code: int, log: str) -> str:
    """The cause of an exit with status `code` (negative: a signal) of the process with this log."""
    if code == -signal.SIGKILL:
        return "killed by SIGKILL, by the kernel for lack of memory unless somebody else did"
    found = find_cause(log)
    if code < 0:
        return f"{describe_exit(code)}: {found}" if found else describe_exit(code)
    if found:
        return found
    last = last_line(log)
    return f"{describe_exit(code)} without an error message" + (f"; its last line: {last}" if last else "")


NEXT: tuple[tuple[str, str], ...] = (
    (r"No space left on device|Disk quota exceeded|cannot be written", "free disk space, then {again}"),
    (
        r"SIGKILL|Cannot allocate memory|MemoryError",
        "check the memory of the machine or container (dmesg shows what the kernel killed), then {again}",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError|No available memory for the cache blocks",
        "lower trainer.micro_batch_tokens, sampler.gpu_memory_utilization or sampler.max_num_seqs, then "
        "{again}",
    ),
    (
        r"Address already in use|EADDRINUSE",
        "set sampler.http_port and telemetry.metrics_port to free ports, or 0 for none, then {again}",
    ),
    (
        r"RedisUnavailable|failed for [\d.]+ s|Error \d+ connecting to|Connection refused",
        "check the Redis server, then {again}",
    ),
    (r"No module named '?([\w.]+)|cannot import name", "install what is missing, then {again}"),
    (
        r"not finite|non-finite|\bnan\b",
        "lower trainer.learning_rate or set a smaller trainer.max_grad_norm, then {again}",
    ),
    (r"Too many open files", "raise `ulimit -n`, then {again}"),
)
"""What helps against which cause. `{again}`: the command that continues or repeats the run."""


def next_step(cause: str, again: str) -> str:
    """What to do about `cause`; `again` is the command that continues or repeats the run."""
    for pattern, advice in NEXT:
        if re.search(pattern, cause, re.IGNORECASE):
            return advice.format(again=again)
    return again
