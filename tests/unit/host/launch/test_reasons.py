"""The one reason for an end, from real ends of logs."""

from __future__ import annotations

import signal

import pytest

from leeway_host.launch.reasons import (
    context,
    describe_exit,
    explain_exit,
    find_cause,
    next_step,
)

LEAKS = """\
nanobind: leaked 4 instances!
 - leaked instance 0x7f8fda09e128 of type "triton._C.libtriton.ir.attribute"
nanobind: leaked 64 types!
 - leaked type "triton._C.libtriton.ir.location"
 - leaked type "ATOMIC_OP"
 - ... skipped remainder
nanobind: leaked 514 functions!
 - leaked function "__str__"
 - leaked function ""
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html/usr/lib/resource_tracker.py:254: \
UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects to clean up at shutdown
  warnings.warn('resource_tracker: There appear to be %d '
"""
BANNER = """\
begin bf16_optimizer
MA 0.51 GB         Max_MA 0.51 GB         CA 0.51 GB         Max_CA 1 GB \n\
CPU Virtual Memory:  used = 1.87 GB, percent = 8.0%
[Gloo] Rank 0 is connected to 0 peer ranks. Expected number of connected peer ranks is : 0
[2026-11-30 21:10:03,001] [INFO] [config.py:655:__init__] Config mesh_device None world_size = 1
Triton is installed, but doesn't include CPU backend. Disabling Triton.
/venv/lib/vllm/triton_utils/dispatcher.py:138: FutureWarning: `torch.distributed.reduce_op`
  if hasattr(value, "__dict__"):
[W1130 21:10:33.414221531 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 137.49it/s]
"""
TRACE = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/x/leeway_trainer/policy.py", line 173, in step
    raise NonFiniteError(
"""

CASES: dict[str, tuple[int, str, str, str]] = {
    # name: (exit status, log, cause, words of the next step)
    "an exception, buried under leaks": (
        1,
        f"{BANNER}21:10:03 INFO trainer-0 published version 0\n{TRACE}ValueError: planted\n{LEAKS}",
        "ValueError: planted",
        "AGAIN",
    ),
    "a logged exception": (
        1,
        f"21:10:04 ERROR trainer-0 OSError: [Errno 28] No space left on device\n{TRACE}"
        f"OSError: [Errno 28] No space left on device\n{LEAKS}",
        "OSError: [Errno 28] No space left on device",
        "free disk space, then AGAIN",
    ),
    "a disk full at a print": (
        1,
        'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
        "OSError: [Errno 28] No space left on device\n",
        "OSError: [Errno 28] No space left on device",
        "free disk space",
    ),
    "killed for lack of memory": (
        -9,
        "21:10:03 ERROR trainer-0 an error from before\n21:10:04 INFO trainer-0 published version 1\n",
        "killed by SIGKILL, by the kernel for lack of memory unless somebody else did",
        "check the memory",
    ),
    "exit without a word": (
        3,
        "21:10:03 INFO sampler-0 joined\nabout to leave\n" + LEAKS,
        "exit code 3 without an error message; its last line: about to leave",
        "AGAIN",
    ),
    "exit with an empty log": (7, "", "exit code 7 without an error message", "AGAIN"),
    "a segmentation fault": (
        -11,
        "21:10:03 INFO sampler-0 joined\nFatal Python error: Segmentation fault\n\n"
        "Current thread 0x00007f19b65e9b80 (most recent call first):\n"
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n',
        "killed by SIGSEGV: Fatal Python error: Segmentation fault",
        "AGAIN",
    ),
    "an abort in C++": (
        -6,
        "terminate called after throwing an instance of 'c10::Error'\n"
        "  what():  CUDA error: an illegal memory access\n",
        "killed by SIGABRT: what():  CUDA error: an illegal memory access",
        "AGAIN",
    ),
    "an engine that does not start": (
        1,
        "(EngineCore_DP0 pid=4711) ERROR 11-30 21:10:33 [core.py:9] EngineCore failed to start.\n"
        "(EngineCore_DP0 pid=4711) ERROR 11-30 21:10:33 [core.py:9] Traceback (most recent call last):\n"
        '(EngineCore_DP0 pid=4711) ERROR 11-30 21:10:33 [core.py:9]   File "/x/core.py", line 1, in f\n'
        "(EngineCore_DP0 pid=4711) ERROR 11-30 21:10:33 [core.py:9]     raise ValueError(\n"
        "(EngineCore_DP0 pid=4711) ERROR 11-30 21:10:33 [core.py:9] ValueError: No available memory for the "
        "cache blocks. Try increasing `gpu_memory_utilization`.\n"
        "(EngineCore_DP0 pid=4711) Process EngineCore_DP0:\n"
        + TRACE
        + "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        "sampler.gpu_memory_utilization",
    ),
    "a port in use": (
        2,
        TRACE + "OSError: [Errno 98] Address already in use\n\n"
        "The above exception was the direct cause of the following exception:\n\n" + TRACE + "leeway.errors."
        "UsageError: telemetry.metrics_port: port 19464 on 0.0.0.0 cannot be used: Address already in use\n",
        "UsageError: telemetry.metrics_port: port 19464 on 0.0.0.0 cannot be used: Address already in use",
        "telemetry.metrics_port to free ports",
    ),
    "Redis lost": (
        1,
        "21:26:35 WARNING controller connecting to redis://h:1/0: Error 111 connecting to h:1. refused.; "
        "retrying\n21:27:36 ERROR controller connecting to redis://h:1/0: failed for 60 s: Error 111 "
        "connecting to h:1. Connection refused.\n",
        "connecting to redis://h:1/0: failed for 60 s: Error 111 connecting to h:1. Connection refused.",
        "check the Redis server",
    ),
    "a reward that cannot be used": (
        2,
        "21:10:33 ERROR sampler-0 "
        "task.reward: 'own:score': module 'own' cannot be imported: No module named 'own'\n" + LEAKS,
        "task.reward: 'own:score': module 'own' cannot be imported: No module named 'own'",
        "install what is missing",
    ),
    "a loss that is not finite": (
        1,
        f"21:10:33 ERROR trainer-0 step 12: the loss is not finite (nan)\n{LEAKS}",
        "step 12: the loss is not finite (nan)",
        "lower trainer.learning_rate",
    ),
    "wrong arguments": (
        2,
        "usage: python -m leeway_trainer [-h] --config CONFIG --run RUN\n                  [--port PORT]\n"
        "python -m leeway_trainer: error: the following arguments are required: --run, --redis, --out\n",
        "python -m leeway_trainer: error: the following arguments are required: --run, --redis, --out",
        "AGAIN",
    ),
    "a missing package": (
        1,
        TRACE + "ModuleNotFoundError: No module named 'vllm'\n",
        "ModuleNotFoundError: No module named 'vllm'",
        "install what is missing",
    ),
    "a missing service": (
        1,
        "/venv/bin/python: No module named leeway_sampler\n",
        "/venv/bin/python: No module named leeway_sampler",
        "install what is missing",
    ),
    "a syntax error": (
        1,
        'Traceback (most recent call last):\n  File "/x/reconcile.py", line 219\n    <<<<<<< HEAD\n'
        "IndentationError: expected an indented block after 'for' statement on line 218\n",
        "IndentationError: expected an indented block after 'for' statement on line 218",
        "AGAIN",
    ),
    "several lines of a configuration": (
        2,
        "21:10:33 ERROR leeway_controller bad.yaml:\n  task.kind: unknown task kind 'digitss'\n  seed: -1\n",
        "bad.yaml:\n  task.kind: unknown task kind 'digitss'\n  seed: -1",
        "AGAIN",
    ),
    "the first of several ranks": (
        1,
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/x.py", line 1, in f\n'
        "[rank1]: ValueError: planted on rank 1\n"
        '[rank0]: Traceback (most recent call last):\n[rank0]:   File "/x.py", line 1, in f\n'
        "[rank0]: RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1\n"
        + TRACE
        + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        + "=" * 60
        + "\nleeway_trainer FAILED\n"
        + "-" * 60
        + "\nRoot Cause (first observed failure):\n[0]:\n  time      : 2026-11-30_21:10:33\n  rank      : 1\n"
        "  exitcode  : 1 (pid: 5)\n  error_file: <N/A>\n" + "=" * 60 + "\n",
        "ValueError: planted on rank 1",
        "AGAIN",
    ),
    "a group of exceptions": (
        1,
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "<string>", line 8, in <module>\n'
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n"
        '    |   File "<string>", line 7, in b\n    | ValueError: inner\n'
        "    +------------------------------------\n",
        "ValueError: inner",
        "AGAIN",
    ),
    "an exception that Python ignored afterwards": (
        1,
        TRACE
        + "ValueError: planted\nException ignored in: <function Engine.__del__ at 0x7f>\n"
        + TRACE
        + "TypeError: "
        "'NoneType' object is not callable\n",
        "ValueError: planted",
        "AGAIN",
    ),
    "logs in JSON": (
        1,
        '{"time": "2026-11-30T21:10:33.001Z", "level": "INFO", "service": "t", "message": "published"}\n'
        '{"time": "2026-11-30T21:10:33.002Z", "level": "ERROR", "service": "t", "message": "KeyError: 1", '
        '"exception": "Traceback (most recent call last):\\n  File\\nKeyError: 1"}\n',
        "KeyError: 1",
        "AGAIN",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reason_is_the_error_that_ended_the_process(name: str) -> None:
    code, log, cause, following = CASES[name]
    assert explain_exit(code, log) == cause
    assert following in next_step(cause, "AGAIN")


@pytest.mark.parametrize("name", CASES)
def test_the_context_has_neither_noise_nor_tracebacks(name: str) -> None:
    shown = "\n".join(context(CASES[name][1], 20))
    for word in (
        "nanobind",
        "leaked",
        "resource_tracker",
        "Traceback",
        "  File",
        "Gloo",
        "MA 0.51",
        "FAILED",
    ):
        assert word not in shown
    assert len(context(CASES[name][1], 2)) <= 2


def test_an_error_that_is_logged_and_raised_is_shown_once() -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1, in step\nValueError: planted\n'
    log = f"00:43:18 INFO trainer-0 waiting\n00:43:20 ERROR trainer-0 ValueError: planted\n{trace}{LEAKS}"
    assert context(log) == ["00:43:18 INFO trainer-0 waiting", "ValueError: planted"]


def test_noise_alone_gives_no_reason() -> None:
    assert find_cause(BANNER + LEAKS) is None
    assert context(BANNER + LEAKS) == []


def test_signals_without_a_name() -> None:
    assert describe_exit(-signal.SIGTERM) == "killed by SIGTERM"
    assert describe_exit(-40) == "killed by signal 40"
    assert describe_exit(2) == "exit code 2"
