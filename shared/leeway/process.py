"""Small facts about processes that every service shares: no orphans, plain logs."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when its parent ends (Linux; elsewhere nothing). For `preexec_fn`.

    `parent`: its process id, if known; a process that was orphaned before this call then ends here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def service_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Command line that all services share: where the run's configuration, streams and model are."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("--config", required=True, help="resolved configuration of the run (YAML)")
    parser.add_argument("--run", required=True, help="name of the run in Redis")
    parser.add_argument("--redis", required=True, help="redis://:password@host:port/db, or env:NAME")
    parser.add_argument("--model", help="model directory (default: model.name of the configuration)")
    return parser


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
