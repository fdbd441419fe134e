"""Small facts about processes that every service shares."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import sys
from urllib.parse import quote

from leeway.errors import EXIT_INTERRUPTED

PASSWORD_ENV = "LEEWAY_REDIS_PASSWORD"
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
    parser.add_argument("--metrics-port", type=int, help="port of /metrics (default: telemetry.metrics_port)")
    parser.add_argument("--model", help="model directory (default: model.name of the configuration)")
    return parser


def exit_on_sigterm() -> None:
    """End at once on SIGTERM, until the service handles it itself.

    The first process of a container has no default for it: a pod that is stopped while it loads a model would
    run into its grace period.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))


def limit_threads(count: int | None) -> None:
    """Set the thread count of the numeric libraries; call it before they are imported."""
    if count:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(count)


def freeze_heap() -> None:
    """Leave what exists now out of every later garbage collection; call it when a service is about to serve.

    A sampler's modules and model are 640,000 objects, and a full collection walks them all while nothing else
    runs.
    """
    gc.collect()
    gc.freeze()


def secret(value: str) -> str:
    """`env:NAME` stands for the environment variable NAME, so that no secret shows in a process list.

    A URL there that has no password gets the one in PASSWORD_ENV, whatever characters that has.
    """
    name = value.removeprefix("env:")
    if name == value:
        return value
    return with_password(os.environ[name], os.environ.get(PASSWORD_ENV))


def with_password(url: str, password: str | None) -> str:
    """`url` with `password` (percent-encoded) where it has none: redis://host -> redis://:password@host."""
    scheme, separator, rest = url.partition("://")
    user, _, place = rest.rpartition("@")
    if not password or ":" in user:
        return url
    return f"{scheme}{separator}{user}:{quote(password, safe='')}@{place}"
