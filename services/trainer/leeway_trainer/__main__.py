"""`python -m leeway_trainer`: wiring. Under torchrun each process is one rank."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from leeway.errors import EXIT_OK, LeewayError
from leeway.process import exit_on_sigterm, freeze_heap, limit_threads, secret, service_parser
from leeway.telemetry.logs import setup_logging
from leeway.telemetry.prometheus import serve_metrics
from leeway.telemetry.tracing import start_tracing


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = service_parser("leeway_trainer", "Trains the policy on rollouts.")
    parser.add_argument("--out", required=True, type=Path, help="output directory of the run")
    parser.add_argument(
        "--resume",
        type=Path,
        help="checkpoint, a run's directory, or auto: --out once it has a checkpoint",
    )
    parser.add_argument("--stay", action="store_true", help="wait for SIGTERM when the run is finished")
    parser.add_argument("--port", type=int, default=0, help="port of /healthz and /readyz; 0: none")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    exit_on_sigterm()
    from leeway.config.load import load_config
    from leeway.health import Health, serve_health

    log = logging.getLogger("leeway_trainer")
    client = keys = None
    health, stack = Health(), ExitStack()
    try:
        config = load_config(args.config, environ={})
        rank = int(os.environ.get("RANK", "0"))
        telemetry = config.telemetry
        setup_logging(telemetry, f"trainer-{rank}")
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        limit_threads(config.trainer.cpu_threads)
        if args.port and os.environ.get("LOCAL_RANK", "0") == "0":
            stack.enter_context(serve_health(health, args.port))
        from leeway.diagnose import tell_start
        from leeway.streams import Keys, client_name, connect

        keys = Keys(args.run)
        if rank == 0:
            redis_config = config.redis
            client = connect(
                secret(args.redis),
                socket_timeout_s=redis_config.socket_timeout_s,
                wait_s=redis_config.reconnect_s,
                name=client_name(args.run, "trainer"),
            )
            tell_start(client, keys, "trainer", redis_config.reconnect_s)
        from leeway.checks.board import post_refused
        from leeway.messages import MessageError
        from leeway_trainer.feed import report_failure
        from leeway_trainer.policy import NonFiniteError
        from leeway_trainer.ranks import start_ranks, stop_ranks
        from leeway_trainer.train import Place, StoppedError, Trainer

        patience_s = max(config.sync.stall_timeout_s, config.sampler.start_timeout_s) + 600
        ranks = start_ranks(config.trainer.device, config.trainer.ranks, patience_s)
        place = Place(args.model or config.model.name, args.out, keys, client, resume_from(args))
        try:
            trainer = Trainer(config, ranks, place)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: setattr(trainer, "stopping", True))
            if rank == 0:
                port = telemetry.metrics_port if args.metrics_port is None else args.metrics_port
                stack.enter_context(serve_metrics(port))
                stop_tracing = start_tracing(
                    telemetry, "trainer", "trainer", args.run, links=config.batch.size
                )
                stack.callback(stop_tracing)
            trainer.on_start = lambda: health.ready.update(ready=True)
            freeze_heap()
            trainer.run()
        except StoppedError:
            raise
        except BaseException as error:
            if client is not None:
                report_failure(client, keys, error)
                if isinstance(error, (NonFiniteError, MessageError)):
                    with suppress(LeewayError):
                        post_refused(client, keys, str(error), source="trainer", budget_s=2.0)
            raise
        stop_ranks()
        if args.stay:
            log.info("the run is finished; waiting to be stopped")
            while not trainer.stopping:
                time.sleep(0.5)
    except LeewayError as error:
        log.error("%s", error)
        return error.exit_code
    finally:
        stack.close()
    return EXIT_OK


def resume_from(args: argparse.Namespace) -> Path | None:
    """Where to resume: with --resume auto the output directory, once it has a checkpoint."""
    if args.resume != Path("auto"):
        return args.resume
    return args.out if (args.out / "checkpoints" / "latest").exists() else None


if __name__ == "__main__":
    sys.exit(main())
