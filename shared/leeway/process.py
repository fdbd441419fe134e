"""Small facts about processes that every service shares: no orphans, plain logs."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends (Linux; elsewhere nothing). For `preexec_fn`."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def setup_logging(level: str, name: str) -> None:
    """One line per record on stderr: time, level, service, message."""
    logging.basicConfig(
        level=level,
        format=f"%(asctime)s %(levelname)s {name} %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
    for noisy in ("urllib3", "httpx", "filelock", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def limit_threads(count: int | None) -> None:
    """Set the thread count of the numeric libraries; call it before they are imported."""
    if count:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(count)


def secret(value: str) -> str:
    """`env:NAME` stands for the environment variable NAME, so that no secret shows in a process list."""
    name = value.removeprefix("env:")
    return os.environ[name] if name != value else value
