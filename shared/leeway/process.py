"""What every service process needs: arguments, signals, threads, garbage collection, secrets."""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn
from urllib.parse import quote

from leeway.errors import EXIT_FAILED, EXIT_INTERRUPTED

log = logging.getLogger(__name__)

PASSWORD_ENV = "LEEWAY_REDIS_PASSWORD"
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends (Linux only). For `preexec_fn`.

    `parent`: the parent's process id, if known; a process that is already orphaned exits at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def service_parser(name: str, description: str) -> argparse.ArgumentParser:
    """The arguments that all services share: the run's configuration, Redis and model."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("--config", required=True, help="resolved configuration of the run (YAML)")
    parser.add_argument("--run", required=True, help="name of the run in Redis")
    parser.add_argument(
        "--redis", required=True, help="redis://:password@host:port/db, env:NAME, or - for standard input"
    )
    parser.add_argument("--metrics-port", type=int, help="port of /metrics (default: telemetry.metrics_port)")
    parser.add_argument("--model", help="model directory (default: model.name of the configuration)")
    return parser


def is_ignored(number: int) -> bool:
    """True for a signal that the parent chose to ignore (nohup, a shell's background job)."""
    return signal.getsignal(number) is signal.SIG_IGN


def stop_signals() -> tuple[int, ...]:
    """The signals that stop a service: SIGTERM, and SIGINT unless it is ignored.

    The launcher and Kubernetes stop services by SIGTERM, so that it counts whatever was inherited.
    """
    return (signal.SIGTERM,) if is_ignored(signal.SIGINT) else (signal.SIGTERM, signal.SIGINT)


def exit_on_sigterm() -> None:
    """Exit on SIGTERM until the service installs its own handler.

    The first process of a container ignores SIGTERM by default: a pod that is deleted while it loads a model
    would not end before its grace period is over.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))


def run_service(main: Callable[[], int]) -> NoReturn:
    """Run `main` and exit with its status; an unexpected error is logged with its traceback.

    The error is the last record of the log; only what native libraries report at exit comes after it.
    Garbage is collected from `freeze_heap` on: before, that is a quarter of the time of importing vLLM.
    """
    gc.disable()
    # Until `main` has read how to log.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", datefmt="%H:%M:%S")
    try:
        code = main()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Exception as error:
        log.error("%s: %s", type(error).__name__, error, exc_info=True)
        code = EXIT_FAILED
    sys.exit(code)


def limit_threads(count: int | None) -> None:
    """Limit the threads of numeric libraries; call it before they are imported. None: no limit."""
    if count:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(count)


def freeze_heap() -> None:
    """Collect garbage from here on, except what exists now; call it before the service's loop starts.

    The modules and the model of a sampler are 640,000 objects, and a full collection visits each of them
    while nothing else runs.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def secret(value: str) -> str:
    """What `value` stands for, so that no secret appears in a process list.

    `-` is the first line of standard input: the launcher's way, which leaves nothing in an environment, also
    not in that of torchrun. `env:NAME` is the environment variable NAME, for containers. A URL in NAME
    without a password gets the one in PASSWORD_ENV, percent-encoded. Both variables are removed, also from
    /proc/PID/environ, where reward code could read them. Later calls know the value; anything else is
    returned as it is.
    """
    if value == "-":
        if value not in _secrets:
            _secrets[value] = sys.stdin.readline().rstrip("\n")
        return _secrets[value]
    name = value.removeprefix("env:")
    if name == value:
        return value
    if name in os.environ:
        _secrets[name] = with_password(os.environ[name], os.environ.get(PASSWORD_ENV))
        for variable in (name, PASSWORD_ENV):
            _wipe_variable(variable)
    return _secrets[name]


_secrets: dict[str, str] = {}


def _wipe_variable(name: str) -> None:
    """Remove an environment variable, also from the block that the kernel shows in /proc/PID/environ."""
    if sys.platform == "linux" and name in os.environ:
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        address = libc.getenv(name.encode())
        if address:
            ctypes.memset(address, ord("*"), len(os.fsencode(os.environ[name])))
    os.environ.pop(name, None)


def with_password(url: str, password: str | None) -> str:
    """`url` with `password` (percent-encoded) if it has none: redis://host -> redis://:password@host."""
    scheme, separator, rest = url.partition("://")
    user, _, place = rest.rpartition("@")
    if not password or ":" in user:
        return url
    return f"{scheme}{separator}{user}:{quote(password, safe='')}@{place}"
