"""The trainer as a process: telemetry, Redis, ranks and signals around a `Trainer`.

/healthz -> connect (rank 0) -> join the ranks -> load the model -> train until the end, a stop or an error
-> an error is reported as event `failed` before the process ends
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import redis

from leeway.checkpoints.find import find_checkpoint, roll_back
from leeway.checkpoints.state import has_checkpoint
from leeway.checks.board import post_rejected
from leeway.config import RunConfig
from leeway.diagnose import tell_start
from leeway.errors import LeewayError, UsageError
from leeway.events import write_event
from leeway.health import Health, serve_health
from leeway.messages import MessageError
from leeway.process import freeze_heap, secret, stop_signals
from leeway.streams import Keys, client_name, connect
from leeway.telemetry.prometheus import serve_metrics
from leeway.telemetry.tracing import start_tracing
from leeway_trainer.errors import NonFiniteError, StoppedError

log = logging.getLogger("leeway_trainer")
WORK_S = 600
"""What one piece of work without a look at the streams may take: a micro-batch, publishing a version, writing
a checkpoint. What ranks wait for each other beyond the longest wait for rollouts."""


def longest_wait_s(config: RunConfig) -> float:
    """The longest time in which a rank that is well makes no progress: it waits for rank 0, which waits for
    rollouts while samplers restart.
    """
    return config.sync.stall_timeout_s + config.sampler.start_timeout_s + WORK_S


def run_process(args: argparse.Namespace, config: RunConfig) -> None:
    """Train as the command line says. Raises LeewayErrors, whose exit code ends the process."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    health = Health()
    with ExitStack() as stack:
        if args.port and local_rank == 0:
            stack.enter_context(serve_health(health, args.port))
        client = connect_first_rank(args, config) if rank == 0 else None
        try:
            place = resume_from(args)
            # Before torch is imported: one that cannot be used is told at once.
            resume = None if place is None else find_checkpoint(place)
            train(args, config, resume, client, health, stack)
        except StoppedError:
            raise
        except BaseException as error:
            if client is not None:
                tell_failure(client, Keys(args.run), error)
            raise


def connect_first_rank(args: argparse.Namespace, config: RunConfig) -> redis.Redis:
    """The connection of rank 0, and the event that what follows may take long."""
    client = connect(
        secret(args.redis),
        socket_timeout_s=config.redis.socket_timeout_s,
        wait_s=config.redis.reconnect_s,
        name=client_name(args.run, "trainer"),
    )
    tell_start(client, Keys(args.run), "trainer", config.redis.reconnect_s)
    return client


def train(
    args: argparse.Namespace,
    config: RunConfig,
    resume: Path | None,
    client: redis.Redis | None,
    health: Health,
    stack: ExitStack,
) -> None:
    """Run the trainer; with --stay, wait for a signal afterwards."""
    from leeway_trainer.epochs import TrainerSetup
    from leeway_trainer.ranks import start_ranks, stop_ranks
    from leeway_trainer.train import Trainer

    limit_s = longest_wait_s(config)
    ranks = start_ranks(config.trainer.device, config.trainer.ranks, limit_s)
    setup = TrainerSetup(args.model or config.model.name, args.out, Keys(args.run), client, resume)
    trainer = Trainer(config, ranks, setup)
    for number in stop_signals():
        signal.signal(number, lambda *_: setattr(trainer, "stopping", True))
    if ranks.first:
        start_telemetry(args, config, stack)
    trainer.on_start = lambda: health.ready.update(ready=True)
    health.alive = lambda: trainer.seconds_since_progress() < limit_s
    freeze_heap()
    trainer.run()
    health.alive = lambda: True
    stop_ranks()
    if args.stay:
        log.info("the run is finished; waiting for SIGTERM (--stay)")
        while not trainer.stopping:
            time.sleep(0.5)


def start_telemetry(args: argparse.Namespace, config: RunConfig, stack: ExitStack) -> None:
    """Serve /metrics and start tracing until `stack` closes."""
    telemetry = config.telemetry
    stack.enter_context(
        serve_metrics(
            telemetry.metrics_port if args.metrics_port is None else args.metrics_port, telemetry.metrics_host
        )
    )
    stack.callback(start_tracing(telemetry, "trainer", "trainer", args.run, links=config.batch.size))


def tell_failure(client: redis.Redis, keys: Keys, error: BaseException) -> None:
    """Write the event `failed`, and a failed check when a number or a message was rejected.

    The process is about to end, so it does not wait for a lost server.
    """
    text = f"{type(error).__name__}: {error}" if not isinstance(error, LeewayError) else str(error)
    try:
        write_event(client, keys, level="error", source="trainer", name="failed", text=text, budget_s=2.0)
        if isinstance(error, (NonFiniteError, MessageError)):
            post_rejected(client, keys, str(error), source="trainer", budget_s=2.0)
    except LeewayError as lost:
        log.error("the failure could not be reported: %s", lost)


def resume_from(args: argparse.Namespace) -> Path | None:
    """Where to resume from; `--resume auto` is the output directory, once it has a checkpoint.

    With `--resume-from STEP`, the checkpoint of that step, which rank 0 makes the latest. Raises UsageError.
    """
    resume: Path | None = args.resume
    if resume == Path("auto"):
        out: Path = args.out
        resume = out if has_checkpoint(out) else None
    if args.resume_from is None:
        return resume
    if resume is None:
        raise UsageError(
            f"--resume-from {args.resume_from}: there is no checkpoint, or --resume is not given"
        )
    if os.environ.get("RANK", "0") == "0":
        return roll_back(resume, args.resume_from)
    return find_checkpoint(resume, args.resume_from)
