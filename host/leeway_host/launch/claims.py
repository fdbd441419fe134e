"""What a run needs for itself before it starts: an output directory, a checkpoint that fits, free ports."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leeway.config import RunConfig
from leeway.errors import UsageError

CONFIG_FILE = "config.yaml"


def default_out(config: RunConfig) -> Path:
    """runs/<name>-<time>, unless the configuration names a directory."""
    if config.output.dir:
        return Path(config.output.dir)
    out = Path(f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return out if not out.exists() else out.with_name(f"{out.name}-{os.getpid()}")


@contextmanager
def claimed(out: Path, resume: bool) -> Iterator[None]:
    """Hold the output directory: nobody else writes there, and no other run's results are overwritten.

    Raises UsageError when it cannot be used, is in use, holds another run, or holds none to resume.
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
                f"{out} holds a run already: give another --out, or go on with it by --resume {out}"
            )
        yield


def check_checkpoint(out: Path, config: RunConfig) -> bool:
    """True when `out` has a checkpoint that this configuration can go on from, False when it has none.

    Raises UsageError when there is one but it was written by another configuration, or nothing is left to do.
    """
    pointer = out / "checkpoints" / "latest"
    if not pointer.exists():
        return False
    state = json.loads((pointer.parent / pointer.read_text().strip() / "leeway.json").read_text())
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
            f"--resume {out}: {state['next_batch']} of trainer.steps={trainer.steps} steps are done already; "
            f"to go on give more, for example --steps {state['next_batch'] + 10}"
        )
    return True


def check_ports(config: RunConfig) -> None:
    """Refuse sampler ports that somebody listens on."""
    first = config.sampler.http_port
    if first and first + config.sampler.replicas > 65536:
        raise UsageError(
            f"sampler.http_port={first}: the last of {config.sampler.replicas} ports is beyond 65535"
        )
    for port in range(first, first + config.sampler.replicas) if first else ():
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((config.sampler.http_host, port))
            except OSError as exc:
                raise UsageError(
                    f"sampler.http_port: port {port} on {config.sampler.http_host} cannot be used "
                    f"({exc.strerror}); choose another one, or 0 for none"
                ) from exc
