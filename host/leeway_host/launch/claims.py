"""What a run needs before it starts: an exclusive output directory, a checkpoint that fits, free ports."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leeway.config import RunConfig
from leeway.errors import UsageError

CONFIG_FILE = "config.yaml"
LAST_PORT = 65535


def default_out(config: RunConfig) -> Path:
    """runs/<name>-<time>, unless the configuration names a directory."""
    if config.output.dir:
        return Path(config.output.dir)
    out = Path(f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return out if not out.exists() else out.with_name(f"{out.name}-{os.getpid()}")


@contextmanager
def claimed(out: Path, resume: bool) -> Iterator[None]:
    """Lock the output directory: no other process writes there, and no other run's results are overwritten.

    Raises UsageError when it cannot be used, is in use, contains another run, or contains none to resume.
    """
    if resume and not (out / CONFIG_FILE).exists():
        raise UsageError(f"--resume {out}: no run there ({out / CONFIG_FILE} is missing)")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("a+")
    except OSError as exc:
        raise UsageError(f"the output directory {out} cannot be used: {exc.strerror}") from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            lock.seek(0)
            raise UsageError(f"{out} is in use by the run of process {lock.read().strip()}") from exc
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        metrics = out / "metrics.jsonl"
        if not resume and metrics.exists() and metrics.stat().st_size:
            raise UsageError(
                f"{out} already contains a run: choose another --out, or continue it with --resume {out}"
            )
        yield


def read_checkpoint(out: Path) -> dict[str, Any] | None:
    """State of the last checkpoint in `out` (`next_batch`, `model`, ...); None when there is none."""
    pointer = out / "checkpoints" / "latest"
    if not pointer.exists():
        return None
    state: dict[str, Any] = json.loads(
        (pointer.parent / pointer.read_text().strip() / "leeway.json").read_text()
    )
    return state


def check_checkpoint(out: Path, config: RunConfig) -> bool:
    """True when `out` has a checkpoint that this configuration can continue from, False when it has none.

    Raises UsageError when another configuration wrote it, or when no step is left to do.
    """
    state = read_checkpoint(out)
    if state is None:
        return False
    trainer = config.trainer
    now = {
        "ranks": trainer.ranks,
        "zero_stage": trainer.zero_stage,
        "dtype": trainer.dtype,
        "model": config.model.name,
    }
    for key, value in now.items():
        if state[key] != value:
            raise UsageError(
                f"--resume {out}: its checkpoint was written with {key}={state[key]!r}, this configuration "
                f"has {value!r}; resume with the same value"
            )
    if state["next_batch"] >= trainer.steps:
        raise UsageError(
            f"--resume {out}: {state['next_batch']} of trainer.steps={trainer.steps} steps are already done; "
            f"to continue, increase them, for example --steps {state['next_batch'] + 10}"
        )
    return True


def check_ports(config: RunConfig) -> None:
    """Raises UsageError for a sampler port that is in use or out of range."""
    first, replicas = config.sampler.http_port, config.sampler.replicas
    if not first:
        return
    if first + replicas - 1 > LAST_PORT:
        raise UsageError(
            f"sampler.http_port={first}: the last of {replicas} ports would be above {LAST_PORT}"
        )
    for port in range(first, first + replicas):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((config.sampler.http_host, port))
            except OSError as exc:
                raise UsageError(
                    f"sampler.http_port: port {port} on {config.sampler.http_host} cannot be used "
                    f"({exc.strerror}); choose another port, or 0 for none"
                ) from exc
