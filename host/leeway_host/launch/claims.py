"""What a run needs before it starts: an exclusive output directory, a checkpoint that fits, free ports."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from leeway.checkpoints.find import read_latest
from leeway.config import RunConfig
from leeway.errors import UsageError
from leeway_host.models.base import is_model_dir

CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"
LOOKED_AT_S = 0.5
"""How long `leeway status` may hold the lock while it looks whether a launcher does."""
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
        lock = (out / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as exc:
        raise UsageError(
            f"the output directory {out} cannot be used: {exc.strerror}; name another: --out DIR"
        ) from exc
    with lock:
        _lock(lock, out)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        metrics = out / "metrics.jsonl"
        if not resume and metrics.exists() and metrics.stat().st_size:
            raise UsageError(
                f"{out} already contains a run: choose another --out, or continue it with --resume {out}"
            )
        yield


def _lock(lock: TextIO, out: Path) -> None:
    deadline = time.monotonic() + LOOKED_AT_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if time.monotonic() > deadline:
                lock.seek(0)
                raise UsageError(f"{out} is in use by the run of process {lock.read().strip()}") from exc
            time.sleep(0.05)


def check_checkpoint(out: Path, config: RunConfig) -> bool:
    """True when `out` has a checkpoint that this configuration can continue from, False when it has none.

    Raises UsageError when another configuration wrote it, or when nothing is left to do, and CheckpointError
    when it is damaged.
    """
    state = read_latest(out)
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
        then = getattr(state, key)
        if then != value:
            raise UsageError(
                f"--resume {out}: its checkpoint was written with {key}={then!r}, this configuration "
                f"has {value!r}; resume with the same value"
            )
    done = state.next_batch
    if done >= trainer.steps and not only_export_is_left(out, config):
        raise UsageError(
            f"--resume {out}: {done} of trainer.steps={trainer.steps} steps are already done; "
            f"to continue, increase them, for example --steps {done + 10}"
        )
    return True


def only_export_is_left(out: Path, config: RunConfig) -> bool:
    """True when every step is done, but the model in Hugging Face format was not written."""
    state = read_latest(out)
    if state is None or state.next_batch < config.trainer.steps or not config.output.save_model:
        return False
    return not is_model_dir(out / "model")


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
